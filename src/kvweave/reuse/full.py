"""No reuse: every token is computed. The reference all others are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvweave.core.plan import RequestPlan
from kvweave.reuse.base import PlanRequest, Reuse, static_plan


@dataclass(frozen=True)
class Full:
    """Full prefill; reads no cache."""

    name: ClassVar[str] = "full"
    reuse: ClassVar[Reuse] = "off"

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        yield static_plan(request, request.candidates)
