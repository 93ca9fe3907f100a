"""Chunks are computed alone, behind their anchor, so that one content has one record whoever asks first."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.core.plan import RequestPlan, Save, View, split
from kvweave.core.spec import KVLayout
from kvweave.engine.engine import Engine
from kvweave.errors import ContextLengthExceeded, PromptExceedsPool
from kvweave.index.chunks import Piece
from kvweave.store.base import ChunkRecord


class RecordSink:
    """Collects the unrotated KV of one chunk, layer by layer (a ``KVSink``)."""

    def __init__(self, layout: KVLayout, num_tokens: int) -> None:
        shape = [(s.num_kv_heads, num_tokens) for s in layout.layers]
        dims = [(s.key_dim, s.value_dim) for s in layout.layers]
        self.keys = tuple(torch.empty(*a, k, dtype=layout.dtype) for a, (k, _) in zip(shape, dims, strict=True))
        self.values = tuple(torch.empty(*a, v, dtype=layout.dtype) for a, (_, v) in zip(shape, dims, strict=True))

    def put(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        self.keys[layer][:, rows] = keys
        self.values[layer][:, rows] = values


def precompute(engine: Engine, token_ids: Sequence[int], anchor_ids: Sequence[int]) -> int:
    """Compute and store the chunks of one document that are missing; returns the tokens that were computed.

    Pieces that share an anchor are computed in one prefill. Nothing is stored unless all layers were computed. A chunk that
    only some tiers hold isn't computed again but copied to the others.
    """
    engine.check_open()
    pieces = engine.parts.chunks.pieces(token_ids, anchor_ids)
    store = engine.parts.chunks.store
    missing = [p for p in pieces if not store.keep(p.identity, wait=True)]
    if not missing:
        return 0
    if not engine.parts.chunks.chunking.isolated_pieces:
        return _prefill(engine, list(anchor_ids), pieces)
    return sum(_prefill(engine, list(anchor_ids), [p]) for p in missing)


def _prefill(engine: Engine, anchor: list[int], pieces: list[Piece]) -> int:
    parts = engine.parts
    ids = anchor + [t for p in pieces for t in p.token_ids]
    if len(ids) > parts.context_length:
        raise ContextLengthExceeded(
            f"A document has {len(ids) - len(anchor):,} tokens, the limit is {parts.context_length - len(anchor):,}. "
            "Cut it into several documents."
        )
    if len(ids) > parts.pool.num_slots:
        raise PromptExceedsPool(
            f"A document needs {len(ids):,} slots, the KV pool has {parts.pool.num_slots:,}. "
            "Use a larger kv_pool, or cut it into several documents."
        )
    while (slots := engine.reserve(len(ids))) is None:
        engine.step()  # running requests hold too many: let them finish
    start = time.perf_counter()
    try:
        sinks = [RecordSink(parts.pool.layout, len(p.token_ids)) for p in pieces]
        for block in split(_plan(torch.tensor(ids), slots, len(anchor), pieces, sinks), parts.prefill_rows):
            engine.executor.run([block])
    finally:
        engine.allocator.release(slots)
    per_token = (time.perf_counter() - start) * 1e3 / len(ids)
    for piece, sink in zip(pieces, sinks, strict=True):
        record = ChunkRecord(piece.identity, sink.keys, sink.values, prefill_ms=per_token * len(piece.token_ids))
        parts.chunks.store.put(record, wait=True)
    engine.counters.precomputed_tokens += len(ids) - len(anchor)
    return len(ids) - len(anchor)


def _plan(ids: Tensor, slots: Tensor, anchor: int, pieces: list[Piece], sinks: list[RecordSink]) -> RequestPlan:
    n = ids.numel()
    saves, at = [], anchor
    for piece, sink in zip(pieces, sinks, strict=True):
        saves.append(Save(at, at + len(piece.token_ids), sink))
        at += len(piece.token_ids)
    return RequestPlan(
        token_ids=ids,
        positions=torch.arange(n),
        slots=slots,
        views=(View(0, n, slots, torch.arange(1, n + 1)),),
        logits=torch.empty(0, dtype=torch.int64),
        saves=tuple(saves),
    )
