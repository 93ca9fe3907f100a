"""Random rows: the control that isolates what a selector's choice is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvweave.core.plan import Keep, RequestPlan
from kvweave.errors import InvalidOption
from kvweave.reuse.base import PlanRequest, Reuse, Work, check_ratio, static_plan, static_work


@dataclass(frozen=True)
class Random:
    """Recompute a uniform, reproducible choice of ``ratio`` of the reused tokens.

    ``full_layers`` = 0 narrows from the first layer (as ``epic`` does); 2 computes layers 0 and 1 for all tokens (as
    ``cacheblend`` does), so that either can be compared at its own timing.
    """

    name: ClassVar[str] = "random"
    reuse: ClassVar[Reuse] = "fused"

    ratio: float = 0.15
    seed: int = 0
    full_layers: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.full_layers < 0:
            raise InvalidOption(f"full_layers={self.full_layers} is out of range. Use 0 or more.")
        if not 0 <= self.seed < 2**63:
            raise InvalidOption(f"seed={self.seed} is out of range. Use 0 to 2^63 - 1.")

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        candidates = request.candidates
        m = math.ceil(self.ratio * candidates.numel())
        generator = torch.Generator().manual_seed(self.seed)
        chosen = candidates[torch.randperm(candidates.numel(), generator=generator)[:m]].sort().values
        if not self.full_layers or self.full_layers >= request.layout.num_layers:
            yield static_plan(request, candidates if self.full_layers else chosen)
            return
        orders = request.computable
        kept = torch.cat([request.forced, chosen]).sort().values
        loads = tuple(request.load(h, torch.arange(h.start, h.stop), first_layer=self.full_layers) for h in request.hits)
        step = Keep(self.full_layers, torch.searchsorted(orders, kept))
        yield request.compile(orders, loads=request.exact_loads() + loads, steps=(step,))

    def work(self, request: PlanRequest) -> Work:
        full, layers = min(self.full_layers, request.layout.num_layers), request.layout.num_layers
        m = math.ceil(self.ratio * request.candidates.numel())
        if not full:
            return static_work(request, m)
        rows = (request.computable.numel(),) * full + (request.forced.numel() + m,) * (layers - full)
        return Work((rows,), loaded=request.candidates.numel(), first_loaded=full)
