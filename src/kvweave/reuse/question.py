"""Question attention (ProphetKV, arXiv:2602.02579): recompute the tokens the question looks at.

A prepass runs only the rows behind the last chunk over the reused KV and sums, per context token, the attention it
receives; the second run, from the embeddings, recomputes the tokens that received most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.core.plan import RequestPlan
from kvweave.errors import InvalidOption
from kvweave.reuse.base import PlanRequest, Reuse, Work, check_ratio, static_plan, static_work
from kvweave.reuse.selectors.base import choose


@dataclass(frozen=True)
class Question:
    """``ratio`` of the reused tokens by question attention; at least the first ``head`` tokens of each chunk."""

    name: ClassVar[str] = "question"
    reuse: ClassVar[Reuse] = "fused"

    ratio: float = 0.15
    head: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.head < 0:
            raise InvalidOption(f"head={self.head} is out of range. Use 0 or more tokens a chunk.")

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        candidates = request.candidates
        m = math.ceil(self.ratio * candidates.numel())
        if not 0 < m < candidates.numel():  # nothing to choose
            yield static_plan(request, candidates[:m])
            return
        # Tokens behind the first one that needs logits are an answer being scored: they must not help to choose.
        first_logit = request.num_tokens - request.num_logits
        question = request.forced[(request.forced > candidates[-1]) & (request.forced <= first_logit)]
        attention = QuestionAttention(torch.zeros(request.num_tokens), context=int(candidates[-1]) + 1)
        holes = request.forced[request.forced < question[0]]
        if holes.numel():  # the question must see the holes' KV, so they are computed in front of it
            yield request.compile(holes, loads=request.loads_without(holes), logits=False, prepass=True)
            yield request.compile(question, loads=(), observer=attention, logits=False, prepass=True)
        else:
            loads = request.loads_without(question)
            yield request.compile(question, loads=loads, observer=attention, logits=False, prepass=True)
        always = torch.isin(candidates, request.heads(self.head))
        chosen = candidates[choose(attention.scores[candidates], m, always=always)]
        rows = torch.cat([request.forced, chosen]).sort().values
        yield request.compile(rows, loads=())  # cached KV is in its slots since the prepass

    def work(self, request: PlanRequest) -> Work:
        n, layers = request.candidates.numel(), request.layout.num_layers
        m = math.ceil(self.ratio * n)
        if not 0 < m < n:
            return static_work(request, m)
        forced = request.forced
        holes = int((forced < request.candidates[-1]).sum())
        passes = (holes, forced.numel() - holes, forced.numel() + m)
        return Work(tuple((rows,) * layers for rows in passes if rows), loaded=n)


@dataclass
class QuestionAttention:
    """Sum over layers, heads and rows of softmax over the *context* keys alone (question keys left out)."""

    scores: Tensor
    """[T] fp32, accumulated."""
    context: int
    """Entries [0, context) are context."""
    tile: int = 64

    def observe(self, layer: int, queries: Tensor, keys: Tensor, visible: Tensor, scaling: float) -> None:
        """Rows are handled ``tile`` at a time, so the weights never exist for all of them at once."""
        keys = keys[:, : self.context].float()
        kv_heads, groups = keys.shape[0], queries.shape[0] // keys.shape[0]
        total = torch.zeros(self.context, device=keys.device)
        for rows in queries.split(self.tile, dim=1):
            q = rows.float().reshape(kv_heads, groups * rows.shape[1], -1)
            weights = torch.softmax(torch.matmul(q, keys.transpose(1, 2)) * scaling, -1)
            total += weights.sum((0, 1))
        self.scores[: self.context] += total.cpu()
