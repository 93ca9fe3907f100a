"""An example technique: the first and the last tokens of every chunk are recomputed, from layer 0.

It lives outside the package and is found by name once it is installed: ``technique="edges:k=8"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvweave.core.plan import RequestPlan
from kvweave.errors import InvalidOption
from kvweave.reuse.base import PlanRequest, Reuse, static_plan


@dataclass(frozen=True)
class Edges:
    """Recompute the first ``k`` and the last ``k`` tokens of every chunk."""

    name: ClassVar[str] = "edges"
    reuse: ClassVar[Reuse] = "fused"

    k: int = 8

    def __post_init__(self) -> None:
        if self.k < 0:
            raise InvalidOption(f"k={self.k} is out of range. Use 0 or more tokens a side.")

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        near = torch.zeros(request.num_tokens, dtype=torch.bool)
        for hit in request.hits:
            near[hit.start : min(hit.start + self.k, hit.stop)] = True
            near[max(hit.stop - self.k, hit.start) : hit.stop] = True
        chosen = request.candidates[near[request.candidates]]
        yield static_plan(request, chosen)
