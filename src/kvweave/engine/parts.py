"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvweave.attention import AttentionBackend
from kvweave.engine.text_stream import TextDecoder
from kvweave.index.chunks import ChunkIndex
from kvweave.kv.pool import KVPool
from kvweave.models.adapter import DecoderAdapter
from kvweave.reuse.controller import Policy


@dataclass(frozen=True)
class EngineParts:
    """Composed by ``kvweave.engine.build``."""

    adapter: DecoderAdapter
    pool: KVPool
    attention: AttentionBackend
    chunks: ChunkIndex
    make_decoder: Callable[[bool], TextDecoder]
    """Told whether special tokens have no text."""
    eos_ids: frozenset[int]
    context_length: int
    prefill_rows: int
    max_step_rows: int
    min_reuse_tokens: int
    max_sequences: int = 256
    """Most sequences that run at a time."""
    swap_bytes: int = 0
    """Host memory for the KV of preempted requests."""
    controller: Policy | None = None
    """How the recompute ratio follows the rates of tiers below host memory; None: it doesn't."""
    lookup_timeout: float = 5.0
    """Seconds after which a request goes on without the caches' answer."""
    load_timeout: float = 10.0
    """Seconds a load may take where nothing better is known."""
