"""EPIC / LegoLink (arXiv:2410.15332): the first tokens of every chunk are recomputed, from layer 0.

Static: which rows are computed is known before the forward, so there are no full layers and the recomputed rows are not
loaded. A chunk's first tokens are false attention sinks when it was computed alone; they are what moves most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvweave.core.plan import RequestPlan
from kvweave.errors import InvalidOption
from kvweave.reuse.base import PlanRequest, Reuse, Work, check_ratio, static_plan, static_work


@dataclass(frozen=True)
class Epic:
    """Recompute the first ``k`` tokens of every chunk behind changed text; ``ratio`` sets k from a share instead."""

    name: ClassVar[str] = "epic"
    reuse: ClassVar[Reuse] = "fused"

    k: int = 16
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.k < 0:
            raise InvalidOption(f"k={self.k} is out of range. Use 0 or more tokens a chunk.")
        if self.ratio is not None:
            check_ratio(self.ratio)

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        yield static_plan(request, request.heads(self._per_border(request)))

    def work(self, request: PlanRequest) -> Work:
        return static_work(request, request.heads(self._per_border(request)).numel())

    def _per_border(self, request: PlanRequest) -> int:
        if self.ratio is None or not request.hits:
            return self.k
        return _level(request, math.ceil(self.ratio * request.candidates.numel()))


def _level(request: PlanRequest, total: int) -> int:
    """The smallest k with which the heads of all runs of chunks hold at least ``total`` tokens (or all there are)."""
    low, high = 0, request.num_tokens
    while low < high:
        k = (low + high) // 2
        if request.heads(k).numel() >= total:
            high = k
        else:
            low = k + 1
    return low
