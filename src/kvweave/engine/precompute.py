"""Chunks are computed alone, behind their anchor, so that one content has one record whoever asks first.

Computing them is a request like any other, whose technique saves what it computes: it shares steps with those that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.core.plan import RequestPlan, Save
from kvweave.core.prompt import TokenPrompt, TokenSpan
from kvweave.core.sampling import SamplingParams
from kvweave.core.spec import KVLayout
from kvweave.engine.engine import Engine
from kvweave.engine.sequence import Request
from kvweave.engine.sequence import Sequence as Running
from kvweave.errors import IntegrityError
from kvweave.index.chunks import Piece
from kvweave.reuse.base import PlanRequest, Reuse, static_plan
from kvweave.store.base import ChunkRecord, Reach


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


@dataclass(frozen=True)
class Recording:
    """A full prefill whose KV from token ``start`` on goes to ``sinks``, one behind the other. No technique users name."""

    start: int
    sinks: tuple[RecordSink, ...]
    name: ClassVar[str] = "recording"
    reuse: ClassVar[Reuse] = "off"

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        saves, at = [], self.start
        for sink in self.sinks:
            stop = at + sink.keys[0].shape[1]
            saves.append(Save(at, stop, sink))
            at = stop
        yield replace(static_plan(request, request.candidates), saves=tuple(saves))


def precompute(
    engine: Engine,
    token_ids: Sequence[int],
    anchor_ids: Sequence[int],
    *,
    tenant: str | None = None,
    salt: str = "",
    expires: float | None = None,
    tiers: Reach = "all",
    run: Callable[[list[Request]], list[Running]] | None = None,
) -> int:
    """Compute and store the chunks of one document that are missing; returns the tokens that were computed.

    Pieces that share an anchor are computed in one prefill. Nothing is stored unless all layers were computed. A chunk that
    only some tiers hold isn't computed again but copied to the others. ``expires``: the unix time from which on what is
    stored now isn't served; ``tiers``: where it may go. ``run`` runs a request (default: here and now, on the engine
    itself); everything else may wait for slow tiers, and so belongs on another thread than the engine's.
    """
    engine.check_open()
    chunks = engine.parts.chunks
    pieces = chunks.pieces(token_ids, anchor_ids, chunks.scope(tenant, salt))
    missing = [p for p in pieces if not chunks.store.keep(p.identity, wait=True, tiers=tiers)]
    if not missing:
        return 0
    groups = [[p] for p in missing] if chunks.chunking.isolated_pieces else [pieces]
    computed = 0
    for group in groups:
        for record in _prefill(engine, list(anchor_ids), group, tenant, run):
            chunks.store.put(record, wait=True, expires=expires, tiers=tiers)
            computed += len(record.identity.token_ids)
    return computed


def _prefill(
    engine: Engine,
    anchor: list[int],
    pieces: list[Piece],
    tenant: str | None,
    run: Callable[[list[Request]], list[Running]] | None,
) -> list[ChunkRecord]:
    ids = anchor + [t for p in pieces for t in p.token_ids]
    sinks = tuple(RecordSink(engine.parts.pool.layout, len(p.token_ids)) for p in pieces)
    prompt = TokenPrompt((TokenSpan(tuple(ids)),))
    recording = Recording(len(anchor), sinks)
    request = Request(prompt, SamplingParams(max_tokens=0), recording, "off", tenant=tenant, internal=True)
    done = engine.run([engine.add(request)]) if run is None else [s.output for s in run([request])]
    if done[0] is None:
        raise IntegrityError("a prefill is done without a report")
    per_token = done[0].reuse.timings["prefill_ms"] / len(ids)
    return [
        ChunkRecord(piece.identity, sink.keys, sink.values, prefill_ms=per_token * len(piece.token_ids))
        for piece, sink in zip(pieces, sinks, strict=True)
    ]
