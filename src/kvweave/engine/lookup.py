"""Exact first, fusion second: what the caches have for a request, and which path that allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch

from kvweave.core.plan import KVSource, LayerReader
from kvweave.core.spec import KVLayout
from kvweave.engine.sequence import Lookup, Sequence
from kvweave.index.chunks import FoundChunk
from kvweave.reuse.base import ChunkHit, PlanRequest
from kvweave.reuse.prefix import Prefix


def find_reuse(
    sequence: Sequence,
    resident: int,
    *,
    layout: KVLayout,
    max_rows: int,
    min_reuse_tokens: int,
) -> Lookup:
    """Chunk hits of a request whose first ``resident`` tokens have their exact KV in (shared) slots already.

    A chunk is exact if its anchor is the whole text in front of it and nothing in front of it is fused. Everything
    else is a fused hit. Fewer than ``min_reuse_tokens`` of those aren't worth an approximation.
    """
    technique, prompt, found = sequence.request.technique, sequence.request.prompt, sequence.found
    asked_why = sequence.request.fallback_reason
    request = PlanRequest(
        token_ids=torch.tensor(prompt.token_ids, dtype=torch.int64),
        slots=sequence.slots[: sequence.num_prompt],
        layout=layout,
        max_rows=max_rows,
        resident=resident,
        num_logits=max(1, sequence.request.keep_logits),
    )
    if technique.reuse == "off":
        return Lookup(request, "off", technique, asked_why, ())
    if found is None:  # the caches had their time
        return Lookup(request, "exact", Prefix(), "load_timeout", ())
    segments = found.segments
    exact, fused = _classify(found.chunks, resident, sequence.num_prompt - request.num_logits)
    request = dataclasses.replace(request, exact_hits=exact)
    if technique.reuse == "exact":
        return Lookup(request, "exact", technique, asked_why, segments)
    if not fused:
        reason = None if found.chunks else "no_chunk_hit"
        return Lookup(request, "exact", Prefix(), reason, segments)
    if sum(h.length for h in fused) < min_reuse_tokens:
        return Lookup(request, "exact", Prefix(), "below_min_reuse", segments)
    return Lookup(dataclasses.replace(request, hits=fused), "fused", technique, None, segments)


def without(request: PlanRequest, lost: Collection[int]) -> PlanRequest:
    """The same request without the hits that start at ``lost``: their tokens are holes, which are computed."""
    kept: list[ChunkHit] = []
    for hit in request.hits:
        if hit.start not in lost:
            joined = not hit.border and bool(kept) and kept[-1].stop == hit.start
            kept.append(dataclasses.replace(hit, border=not joined))
    exact = tuple(hit for hit in request.exact_hits if hit.start not in lost)
    return dataclasses.replace(request, exact_hits=exact, hits=tuple(kept))


def _classify(found: tuple[FoundChunk, ...], resident: int, end: int) -> tuple[tuple[ChunkHit, ...], tuple[ChunkHit, ...]]:
    exact: list[ChunkHit] = []
    fused: list[ChunkHit] = []
    for chunk in found:
        start, stop = max(chunk.start, resident), min(chunk.stop, end)  # tokens that need logits are always computed
        if start >= stop:
            continue
        skipped = start - chunk.start
        source = chunk.record if not skipped else _Tail(chunk.record, skipped)
        if chunk.exact and not fused:
            exact.append(ChunkHit(start, stop, source, chunk.birth + skipped, chunk.border, chunk.record.tier))
            continue
        joined = not chunk.border and bool(fused) and fused[-1].stop == start  # its piece in front is fused as well
        fused.append(ChunkHit(start, stop, source, chunk.birth + skipped, not joined, chunk.record.tier))
    return tuple(exact), tuple(fused)


@dataclasses.dataclass(frozen=True)
class _Tail:
    """A record without its first tokens: those are covered by the exact prefix."""

    record: KVSource
    skip: int

    def read(self, tokens: torch.Tensor, first_layer: int, ticket: int, timeout: float) -> LayerReader:
        return self.record.read(tokens + self.skip, first_layer, ticket, timeout)
