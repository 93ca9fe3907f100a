"""Exact first, fusion second: what the caches have for a request, and which path that allows."""

from __future__ import annotations

import dataclasses

import torch

from kvweave.core.plan import KVSource
from kvweave.core.spec import KVLayout
from kvweave.engine.sequence import Lookup, Sequence
from kvweave.index.chunks import ChunkIndex, FoundChunk
from kvweave.reuse.base import ChunkHit, PlanRequest
from kvweave.reuse.prefix import Prefix


def find_reuse(
    sequence: Sequence,
    resident: int,
    *,
    chunks: ChunkIndex,
    layout: KVLayout,
    max_rows: int,
    min_reuse_tokens: int,
) -> Lookup:
    """Chunk hits of a request whose first ``resident`` tokens have their exact KV in (shared) slots already.

    A chunk is exact if its anchor is the whole text in front of it and nothing in front of it is fused. Everything
    else is a fused hit. Fewer than ``min_reuse_tokens`` of those aren't worth an approximation.
    """
    technique, prompt = sequence.request.technique, sequence.request.prompt
    request = PlanRequest(
        token_ids=torch.tensor(prompt.token_ids, dtype=torch.int64),
        slots=sequence.slots[: sequence.num_prompt],
        layout=layout,
        max_rows=max_rows,
        resident=resident,
        num_logits=max(1, sequence.request.keep_logits),
    )
    if technique.reuse == "off":
        return Lookup(request, "off", technique, None, ())
    found, segments = chunks.lookup(prompt, sequence.request.anchors)
    exact, fused = _classify(found, resident, sequence.num_prompt - request.num_logits)
    request = dataclasses.replace(request, exact_hits=exact)
    if technique.reuse == "exact":
        return Lookup(request, "exact", technique, None, segments)
    if not fused:
        reason = None if found else "no_chunk_hit"
        return Lookup(request, "exact", Prefix(), reason, segments)
    if sum(h.length for h in fused) < min_reuse_tokens:
        return Lookup(request, "exact", Prefix(), "below_min_reuse", segments)
    return Lookup(dataclasses.replace(request, hits=fused), "fused", technique, None, segments)


def without_hits(request: PlanRequest) -> PlanRequest:
    """The same request on the exact path."""
    return dataclasses.replace(request, hits=())


def _classify(found: list[FoundChunk], resident: int, end: int) -> tuple[tuple[ChunkHit, ...], tuple[ChunkHit, ...]]:
    exact: list[ChunkHit] = []
    fused: list[ChunkHit] = []
    for chunk in found:
        start, stop = max(chunk.start, resident), min(chunk.stop, end)  # tokens that need logits are always computed
        if start >= stop:
            continue
        skipped = start - chunk.start
        source = chunk.record if not skipped else _Tail(chunk.record, skipped)
        if chunk.exact and not fused:
            exact.append(ChunkHit(start, stop, source, chunk.record.birth + skipped, chunk.border))
            continue
        joined = not chunk.border and bool(fused) and fused[-1].stop == start  # its piece in front is fused as well
        fused.append(ChunkHit(start, stop, source, chunk.record.birth + skipped, border=not joined))
    return tuple(exact), tuple(fused)


@dataclasses.dataclass(frozen=True)
class _Tail:
    """A record without its first tokens: those are covered by the exact prefix."""

    record: KVSource
    skip: int

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.record.layer(layer)
        return keys[:, self.skip :], values[:, self.skip :]
