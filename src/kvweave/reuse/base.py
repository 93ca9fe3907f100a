"""What a technique is: a compiler from a request to plans.

A technique is one frozen dataclass with one method, ``plan``. It sees the request's tokens, the slots they got, which of
them are exact already and which cached chunks stand where; it yields ``RequestPlan``s, run one after the other. Yielding
(instead of returning one) lets a technique look at what an earlier plan observed before it compiles the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvweave.core.plan import Keep, KVSource, Load, Observer, RequestPlan, Select, View
from kvweave.core.spec import KVLayout
from kvweave.errors import InvalidOption

Reuse = Literal["off", "exact", "fused"]


@dataclass(frozen=True)
class ChunkHit:
    """A cached chunk found in a prompt: tokens [start, stop) in prompt order.

    ``birth`` is the position its first token had when it was computed (its anchor's length). ``border`` is False if the
    chunk's own preceding piece stands directly in front of it, so that nothing it attended to has changed.
    """

    start: int
    stop: int
    source: KVSource
    birth: int
    border: bool = True
    tier: str = "host"
    """Where its KV lies."""

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PlanRequest:
    """A request as a technique sees it. T = prompt tokens; order = index in the prompt; position = order here."""

    token_ids: Tensor
    """[T] int64"""
    slots: Tensor
    """[T] int64: where each token's KV lives or will live."""
    layout: KVLayout
    max_rows: int
    """Rows that fit one forward pass."""
    resident: int = 0
    """Tokens in front whose exact KV is in their (shared) slots already."""
    exact_hits: tuple[ChunkHit, ...] = ()
    """Chunks behind the resident tokens that stand where their anchor says: exact, loaded without repair."""
    hits: tuple[ChunkHit, ...] = ()
    """All other chunk hits, in prompt order, disjoint: approximate unless repaired."""
    num_logits: int = 1
    """How many of the last tokens need logits; those are always computed."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def exact_until(self) -> int:
        """Tokens [0, exact_until) are exact once they are computed or loaded; the first fused token ends that."""
        return self.hits[0].start if self.hits else self.num_tokens

    @property
    def num_cached(self) -> int:
        """Tokens whose exact KV is reused."""
        return self.resident + sum(h.length for h in self.exact_hits)

    @property
    def computable(self) -> Tensor:
        """Orders of all tokens without exact KV, [T - num_cached] ascending."""
        mask = torch.ones(self.num_tokens, dtype=torch.bool)
        mask[: self.resident] = False
        for hit in self.exact_hits:
            mask[hit.start : hit.stop] = False
        return torch.nonzero(mask).flatten()

    @property
    def candidates(self) -> Tensor:
        """Orders of all tokens of fused chunks, [N] ascending. Tokens that need logits are never among them."""
        end = self.num_tokens - self.num_logits
        return concat_orders([torch.arange(h.start, min(h.stop, end)) for h in self.hits if h.start < end])

    @property
    def forced(self) -> Tensor:
        """Orders always computed: holes, text between chunks, the question, the last prompt token."""
        orders = self.computable
        return orders[~torch.isin(orders, self.candidates)]

    def heads(self, k: int) -> Tensor:
        """Orders of the first ``k`` candidates behind every border.

        Pieces that were computed together and stand together are one run: only its start sees changed text in front.
        """
        parts, start = [], 0
        for i, hit in enumerate(self.hits):
            start = hit.start if hit.border else start
            if i + 1 == len(self.hits) or self.hits[i + 1].border:
                stop = min(start + k, hit.stop, self.num_tokens - self.num_logits)
                parts.append(torch.arange(start, max(start, stop)))
        return concat_orders(parts)

    def exact_loads(self) -> tuple[Load, ...]:
        return tuple(self.load(h, torch.arange(h.start, h.stop)) for h in self.exact_hits)

    def load(self, hit: ChunkHit, orders: Tensor, *, first_layer: int = 0, rotate: bool = True) -> Load:
        """Load the tokens of ``hit`` at ``orders`` (ascending) into their slots, keys rotated to where they now stand."""
        tokens = orders - hit.start
        return Load(
            source=hit.source,
            tokens=tokens,
            slots=self.slots[orders],
            positions=orders,
            rotate_at=orders if rotate else tokens + hit.birth,
            first_layer=first_layer,
        )

    def loads_without(self, computed: Tensor, *, rotate: bool = True) -> tuple[Load, ...]:
        """Exact hits, and of every other hit the tokens that are not ``computed`` (ascending orders)."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        mask[computed] = True
        loads = []
        for hit in self.hits:
            orders = torch.arange(hit.start, hit.stop)
            orders = orders[~mask[hit.start : hit.stop]]
            if orders.numel():
                loads.append(self.load(hit, orders, rotate=rotate))
        return self.exact_loads() + tuple(loads)

    def compile(
        self,
        orders: Tensor,
        *,
        loads: tuple[Load, ...],
        steps: tuple[Keep | Select, ...] = (),
        observer: Observer | None = None,
        logits: bool = True,
        prepass: bool = False,
    ) -> RequestPlan:
        """A plan with one view: the rows at ``orders`` (ascending), each of which sees every token up to itself.

        ``steps`` are in row indices. The rows of a ``prepass`` are charged to the recompute budget.
        """
        last = int(orders[-1])
        return RequestPlan(
            token_ids=self.token_ids[orders],
            positions=orders,
            slots=self.slots[orders],
            views=(View(0, orders.numel(), self.slots[: last + 1], orders + 1),),
            logits=torch.nonzero(orders >= self.num_tokens - self.num_logits).flatten() if logits else orders[:0],
            steps=steps,
            loads=loads,
            observer=observer,
            reusable=torch.isin(orders, self.candidates),
            prepass=prepass,
        )


class FallBack(Exception):
    """Raised by ``plan`` when a technique can't be trusted here; the exact path runs instead, counted under ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Work:
    """What a technique will compute and load for a request, known before it runs."""

    passes: tuple[tuple[int, ...], ...]
    """Rows of each forward pass in every layer."""
    loaded: int
    """Tokens of fused chunks whose KV is loaded."""
    first_loaded: int = 0
    """From this layer on."""


@runtime_checkable
class Technique(Protocol):
    """The plugin contract. A frozen dataclass whose fields are its options.

    A technique may also have ``work(request) -> Work``; with it the controller can tell whether its loads pay, and set its
    ``ratio`` if it has one.
    """

    name: ClassVar[str]
    reuse: ClassVar[Reuse]
    """What it may read: nothing, exact KV only, or chunks anywhere."""

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        """Yield the plans of the prefill; the last one has the logits of the prompt's last token."""
        ...


def concat_orders(parts: list[Tensor]) -> Tensor:
    """Concatenate index lists; an empty int64 tensor if there is none."""
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def check_ratio(ratio: float, name: str = "ratio") -> None:
    if not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
        raise InvalidOption(f"{name}={ratio!r} is out of range. Use a share of the reused tokens between 0 and 1.")


def static_work(request: PlanRequest, chosen: int) -> Work:
    """Of ``static_plan`` with so many chosen candidates."""
    rows = request.forced.numel() + chosen
    return Work(((rows,) * request.layout.num_layers,), loaded=request.candidates.numel() - chosen)


def static_plan(request: PlanRequest, chosen: Tensor, *, rotate: bool = True) -> RequestPlan:
    """Forced rows and ``chosen`` candidates computed from layer 0; only the other tokens are loaded."""
    rows = torch.cat([request.forced, chosen]).sort().values
    return request.compile(rows, loads=request.loads_without(rows, rotate=rotate))
