"""CacheBlend (EuroSys'25, arXiv:2405.16444): recompute the tokens whose KV deviates most.

All rows run through the check layer, so the KV of the layers up to it is exact. There the new KV is compared with the
cached one; the rows with the highest deviation go on, the others keep their cached KV and take part as keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvweave.core.plan import RequestPlan, Select
from kvweave.core.spec import KVLayout
from kvweave.errors import InvalidOption, suggest
from kvweave.reuse.base import FallBack, PlanRequest, Reuse, Work, check_ratio
from kvweave.reuse.selectors.deviation import KVDeviation

SCHEDULES = ("single", "gradual")


@dataclass(frozen=True)
class CacheBlend:
    """Deviation-based selection.

    ``schedule`` single: one check with ratio r (as all released code does); gradual: three checks with falling ratios whose
    mean over the layers behind the first check is r (the paper's text). ``deviation`` is a formula of
    ``selectors.deviation``. ``head`` tokens of each chunk are always recomputed, inside the budget. ``check_layer`` None
    means 1, or one behind the first full-attention layer in models with sliding windows.
    """

    name: ClassVar[str] = "cacheblend"
    reuse: ClassVar[Reuse] = "fused"

    ratio: float = 0.15
    schedule: Literal["single", "gradual"] = "single"
    deviation: str = "kv"
    head: int = 4
    check_layer: int | None = None

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        KVDeviation(self.deviation)
        if self.schedule not in SCHEDULES:
            raise InvalidOption(f"schedule '{self.schedule}' is unknown. {suggest(self.schedule, SCHEDULES)}")
        if self.check_layer is not None and self.check_layer < 1:
            raise InvalidOption("check_layer=0 sees no deviation (layer 0 depends on the token alone). Use 1 or later.")
        if self.head < 0:
            raise InvalidOption(f"head={self.head} is out of range. Use 0 or more tokens a chunk.")

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        checks = self.checks(request.layout)
        if not checks:
            raise FallBack("unsupported_model")
        orders = request.computable
        for start, stop in _blocks(request, orders):
            yield self._block(request, checks, orders[start:stop], first=start == 0)

    def work(self, request: PlanRequest) -> Work:
        """Blocks of long prompts add up to the same rows."""
        rows: list[int] = []
        n, heads, forced = request.candidates.numel(), request.heads(self.head).numel(), request.forced.numel()
        checks = self.checks(request.layout)
        for layer in range(request.layout.num_layers):
            kept = [max(heads, math.ceil(ratio * n)) for check, ratio in checks if check < layer]
            rows.append(forced + (kept[-1] if kept else n))
        return Work((tuple(rows),), loaded=n, first_loaded=checks[0][0] if checks else 0)

    def checks(self, layout: KVLayout) -> list[tuple[int, float]]:
        """(layer, ratio) of every check; empty if the model has no usable check layer, so that nothing is fused."""
        layers = layout.num_layers
        first = self.check_layer
        if first is None:
            full = layout.first_full_layer
            first = 1 if full == 0 else full + 1
            if first > max(1, layers // 4):
                return []
        if first > layers - 2:
            return []
        if self.schedule == "gradual" and (schedule := _gradual(first, layers, self.ratio)):
            return schedule
        return [(first, self.ratio)]

    def _block(self, request: PlanRequest, checks: list[tuple[int, float]], orders: Tensor, *, first: bool) -> RequestPlan:
        """The rows at ``orders``: each block chooses its own share and attends to the finished blocks."""

        def rows(wanted: Tensor) -> Tensor:
            return torch.searchsorted(orders, wanted[torch.isin(wanted, orders)])

        candidates, heads, always = rows(request.candidates), rows(request.heads(self.head)), rows(request.forced)
        steps = tuple(
            Select(
                after_layer=layer,
                scorer=KVDeviation(self.deviation),
                candidates=candidates,
                heads=heads,
                always=always,
                keep=max(heads.numel(), math.ceil(ratio * candidates.numel())),
            )
            for layer, ratio in checks
        )
        start, stop = int(orders[0]), int(orders[-1]) + 1
        loads = tuple(
            request.load(h, torch.arange(max(h.start, start), min(h.stop, stop)), first_layer=checks[0][0])
            for h in request.hits
            if h.start < stop and h.stop > start
        )
        exact = request.exact_loads() if first else ()
        return request.compile(orders, loads=exact + loads, steps=steps, logits=True)


def _gradual(first: int, layers: int, ratio: float) -> list[tuple[int, float]]:
    """Checks at c1, round(L/8), round(L/4) with 1.5 r, 1.2 r and the rest; [] where that is not a falling schedule."""
    at = [first, max(round(layers / 8), first + 1), max(round(layers / 4), first + 2)]
    if at[-1] > layers - 2:
        return []
    counts = [at[1] - at[0], at[2] - at[1], layers - 1 - at[2]]
    rest = ratio * (sum(counts) - 1.5 * counts[0] - 1.2 * counts[1]) / counts[2]
    ratios = [1.5 * ratio, 1.2 * ratio, rest]
    if ratios[0] > 1.0 or not ratios[0] > ratios[1] > ratios[2] > 0.0:
        return []
    return list(zip(at, ratios, strict=True))


def _blocks(request: PlanRequest, orders: Tensor) -> Iterator[tuple[int, int]]:
    """[start, stop) ranges of ``orders`` of at most ``max_rows`` rows, cut at a chunk's border where one is near enough."""
    borders = torch.searchsorted(orders, torch.tensor([h.start for h in request.hits])).tolist()
    start, end = 0, orders.numel()
    while start < end:
        stop = min(start + request.max_rows, end)
        if stop < end:
            stop = max((b for b in borders if start + request.max_rows // 2 < b <= stop), default=stop)
        yield start, stop
        start = stop
