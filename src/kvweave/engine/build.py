"""From a model source and a configuration to a checked engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvweave.config import EngineConfig, parse_size
from kvweave.core.keys import ModelFingerprint
from kvweave.engine.engine import Engine
from kvweave.engine.parts import EngineParts
from kvweave.engine.profile import Profile, calibrate
from kvweave.engine.self_check import SelfCheck, self_check
from kvweave.engine.text_stream import TextDecoder
from kvweave.engine.tuning import pick_attention, pick_device, pick_dtype, pick_prefill_rows, pick_threads
from kvweave.errors import InvalidOption
from kvweave.index.chunks import ChunkIndex, Chunking
from kvweave.kv.pool import KVPool
from kvweave.models.adapter import DecoderAdapter
from kvweave.models.directory import weights_digest
from kvweave.models.sources import default_home
from kvweave.models.tokenizer import IncrementalDecoder, Tokenizer
from kvweave.store.compose import open_store

_POOL_SHARE = 0.25  # of free memory, for kv_pool="auto"
_LOOKUP_SLACK = 1.0  # seconds behind the tiers' own deadline: for the look at a tenant's epoch, and for threads to wake
_POOL_CONTEXTS = 4  # but no more than so many full contexts


@dataclass(frozen=True)
class Built:
    """An engine and what was decided on the way; ``doctor`` prints it."""

    engine: Engine
    tokenizer: Tokenizer
    fingerprint: ModelFingerprint
    device: torch.device
    dtype: torch.dtype
    threads: int
    attention: str
    check: SelfCheck


def build_engine(directory: Path, config: EngineConfig) -> Built:
    """Load, measure, self-check, compose. Raises ``ModelError``s and ``ConfigError``s before anything runs."""
    device = pick_device(config.device)
    threads = pick_threads(config.threads, device)
    dtype = pick_dtype(config.dtype, device)
    tokenizer = Tokenizer(directory, config.chat_template, config.content_format)  # type: ignore[arg-type]
    adapter = DecoderAdapter.load(directory, dtype=dtype, device=device)
    attention = pick_attention(config.attention, adapter.layout, device)
    check = self_check(adapter, attention)
    fingerprint = fingerprint_of(directory, adapter, config.tiers.codec)
    chunking = Chunking(config.chunk_size, config.min_chunk, config.isolated_pieces)
    context_length = _context_length(adapter, config)
    pool = _make_pool(adapter, config, context_length)
    home = Path(config.home) if config.home else default_home()
    store = open_store(parse_size(config.chunk_cache, "chunk_cache"), config.tiers, adapter.layout, home)

    def make_decoder(skip_special_tokens: bool) -> TextDecoder:
        return IncrementalDecoder(tokenizer, skip_special_tokens)

    parts = EngineParts(
        adapter=adapter,
        pool=pool,
        attention=attention,
        chunks=ChunkIndex(store, fingerprint, config.tenant, chunking, lossy=config.tiers.codec != "raw"),
        make_decoder=make_decoder,
        eos_ids=adapter.eos_ids,
        context_length=context_length,
        prefill_rows=pick_prefill_rows(config.prefill_rows, attention, device),
        max_step_rows=config.max_step_rows,
        min_reuse_tokens=config.min_reuse_tokens,
        max_sequences=config.max_num_seqs,
        swap_bytes=parse_size(config.swap_space, "swap_space"),
        lookup_timeout=config.tiers.lookup_timeout + _LOOKUP_SLACK,
        controller=None if config.controller == "off" else config.controller,  # type: ignore[arg-type]
        load_timeout=config.tiers.load_timeout,
    )
    engine = _with_profile(parts, home, f"{fingerprint.short}-{device.type}-{threads}")
    return Built(engine, tokenizer, fingerprint, device, dtype, threads, attention.name, check)


def _with_profile(parts: EngineParts, home: Path, name: str) -> Engine:
    """An engine that knows its rates, if there are tiers for which they matter."""
    if parts.controller is None or parts.chunks.store.immediate:
        return Engine(parts)
    engine = Engine(parts, Profile(home / "profiles" / f"{name}.json"))
    if not engine.profile.measured:
        calibrate(engine, engine.profile)
        engine.profile.save()
    return engine


def fingerprint_of(directory: Path, adapter: DecoderAdapter, codec: str) -> ModelFingerprint:
    """Weights, tokenizer and config by content; dtype, record layout and codec by name."""
    return ModelFingerprint.of(
        content=weights_digest(directory),
        family=str(adapter.config.model_type),
        dtype=str(adapter.layout.dtype),
        record="kvweave/record/1",
        codec=codec,
        adapter="none",
    )


def _context_length(adapter: DecoderAdapter, config: EngineConfig) -> int:
    if config.max_model_len is None:
        return adapter.context_length
    if config.max_model_len > adapter.context_length:
        raise InvalidOption(
            f"max_model_len={config.max_model_len} is above the model's own limit of {adapter.context_length}. Lower it."
        )
    return config.max_model_len


def _make_pool(adapter: DecoderAdapter, config: EngineConfig, context_length: int) -> KVPool:
    per_token = adapter.layout.bytes_per_token
    if config.kv_pool == "auto":
        if adapter.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(adapter.device)
        else:
            free = psutil.virtual_memory().available
        slots = min(int(_POOL_SHARE * free) // per_token, _POOL_CONTEXTS * context_length)
    else:
        slots = parse_size(config.kv_pool, "kv_pool") // per_token
    if slots < 2:
        raise InvalidOption(
            f"A KV pool of {config.kv_pool} holds {slots} tokens; each takes {per_token:,} bytes. Give it more memory."
        )
    try:
        return KVPool(adapter.layout, slots, adapter.device)
    except (RuntimeError, MemoryError) as error:  # what torch's allocators raise
        raise InvalidOption(
            f"A KV pool of {slots * per_token / 2**30:,.1f} GiB can't be allocated. Make kv_pool smaller."
        ) from error
