"""Full reuse without repair: PromptCache (arXiv:2311.04934) with positions put right, and its negative control."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvweave.core.plan import RequestPlan
from kvweave.reuse.base import PlanRequest, Reuse, Work, concat_orders, static_plan, static_work


@dataclass(frozen=True)
class Naive:
    """Every cached token is reused at its right position; none is recomputed. Fast, blind between documents."""

    name: ClassVar[str] = "naive"
    reuse: ClassVar[Reuse] = "fused"

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        yield static_plan(request, concat_orders([]))

    def work(self, request: PlanRequest) -> Work:
        return static_work(request, 0)


@dataclass(frozen=True)
class Raw:
    """As ``naive``, but keys stay at the position they were computed at. Wrong on purpose: shows what rotation is for."""

    name: ClassVar[str] = "raw"
    reuse: ClassVar[Reuse] = "fused"

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        yield static_plan(request, concat_orders([]), rotate=False)

    def work(self, request: PlanRequest) -> Work:
        return static_work(request, 0)
