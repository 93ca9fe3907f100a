"""Exact reuse: the longest cached prefix, and chunks that stand exactly where their anchor says. Lossless."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvweave.core.plan import RequestPlan
from kvweave.reuse.base import PlanRequest, Reuse, static_plan


@dataclass(frozen=True)
class Prefix:
    """Radix prefix cache (as in SGLang, vLLM); everything behind the first difference is computed."""

    name: ClassVar[str] = "prefix"
    reuse: ClassVar[Reuse] = "exact"

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        yield static_plan(request, request.candidates)
