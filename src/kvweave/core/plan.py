"""The plan: a small program that says what one forward pass does for one request.

A technique compiles a request to plans; the executor runs any batch of plans. In every layer it does
**load -> select -> write -> attend**: stored KV arrives in its slots (rotated to its place), a ``Select`` that looks at
this layer compares old and new KV, the rows' new K/V overwrite their slots, every row attends to the slots its view
shows it. Rows only ever leave: a row not computed at layer l has no hidden state at l + 1.

Vocabulary: a *row* is a token computed in this forward, identified by its index into ``token_ids``; a *slot* is one
token's place in the KV pool, the same in all layers; the *order* of a token is its place in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvweave.core.spec import KVLayout
from kvweave.errors import PlanError


class LayerReader(Protocol):
    """Stored KV on its way: layers are taken once each, in ascending order."""

    @property
    def tier(self) -> str:
        """Where the bytes come from."""
        ...

    @property
    def bytes_read(self) -> int:
        """So far."""
        ...

    @property
    def load_seconds(self) -> float:
        """Time the medium and the checks took so far, over all threads."""
        ...

    @property
    def jobs(self) -> int:
        """Reads that may run at the same time; 0 where nothing is read."""
        ...

    @property
    def arrived(self) -> bool:
        """True if no layer would wait for what is on its way (it may still raise)."""
        ...

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the tokens asked for, each [kv_heads, tokens, dim]. Waits; raises ``LoadFailed``."""
        ...

    def close(self) -> None:
        """Whatever is still on its way isn't wanted any more."""
        ...


class KVSource(Protocol):
    """Stored KV of a chunk. Keys are unrotated: KV at rest has no position."""

    def read(self, tokens: Tensor, first_layer: int, ticket: int, timeout: float) -> LayerReader:
        """Start to fetch ``tokens`` [n] (ascending) of the layers from ``first_layer`` on, and nothing else.

        Loads with a lower ``ticket`` go first; those of one plan share theirs, so that they arrive layer by layer. What
        isn't there ``timeout`` seconds from now is too late.
        """
        ...


class KVSink(Protocol):
    """Takes the unrotated K and V [kv_heads, rows, dim] of a plan's saved rows, once per layer, in ascending layers."""

    def put(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None: ...


class Observer(Protocol):
    """Watches the rows of a plan attend, e.g. to read attention weights that fast kernels hide."""

    def observe(self, layer: int, queries: Tensor, keys: Tensor, visible: Tensor, scaling: float) -> None:
        """``queries`` [heads, rows, dim] and ``keys`` [kv_heads, context, dim], both rotated; ``visible`` [rows]."""
        ...


class Scorer(Protocol):
    """Ranks candidate rows from what is seen at a check layer (a selector of phase "check")."""

    def score(self, k_new: Tensor, v_new: Tensor, k_old: Tensor, v_old: Tensor) -> Tensor:
        """All [kv_heads, candidates, dim], keys at the same positions; returns [candidates] fp32, higher = sooner."""
        ...


@dataclass(frozen=True)
class View:
    """A run of rows [start, stop) that share one ordered slot list; row i sees the first ``visible[i - start]`` of it."""

    start: int
    stop: int
    context: Tensor
    """[m] int64: slots in prompt order."""
    visible: Tensor
    """[stop - start] int64, ascending."""


@dataclass(frozen=True)
class Keep:
    """Before layer ``before_layer`` only ``rows`` (ascending row indices) go on."""

    before_layer: int
    rows: Tensor


@dataclass(frozen=True)
class Select:
    """After layer ``after_layer`` the ``keep`` candidates with the highest score go on, and ``always``.

    ``heads`` are candidates that are kept whatever their score, inside the budget. Ties go to the earlier row.
    """

    after_layer: int
    scorer: Scorer
    candidates: Tensor
    heads: Tensor
    always: Tensor
    keep: int


@dataclass(frozen=True)
class Load:
    """Stored KV of a chunk into slots: tokens ``tokens`` of ``source`` from ``first_layer`` on.

    ``rotate_at`` [n] is the position the keys are rotated to: the slots' own positions, except in the negative control
    ``raw`` which leaves keys at the positions they were made at.
    """

    source: KVSource
    tokens: Tensor
    slots: Tensor
    positions: Tensor
    rotate_at: Tensor
    first_layer: int = 0
    reader: LayerReader | None = None
    """Set once the load has begun."""

    def begin(self, ticket: int, timeout: float) -> Load:
        """The same load, on its way."""
        return replace(self, reader=self.source.read(self.tokens, self.first_layer, ticket, timeout))


@dataclass(frozen=True)
class Save:
    """The rows [start, stop) go to ``sink`` with unrotated keys; there they are tokens ``offset``..."""

    start: int
    stop: int
    sink: KVSink
    offset: int = 0


@dataclass(frozen=True)
class RequestPlan:
    """One forward pass of one request. Tensors are int64 on the CPU unless stated; n = number of rows."""

    token_ids: Tensor
    """[n]"""
    positions: Tensor
    """[n]"""
    slots: Tensor
    """[n]: where each row's K and V are written."""
    views: tuple[View, ...]
    logits: Tensor
    """[k] rows whose logits are wanted; they must survive to the last layer."""
    steps: tuple[Keep | Select, ...] = ()
    """In ascending order of the layer they act before."""
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    observer: Observer | None = None
    reusable: Tensor | None = None
    """[n] bool: rows that are tokens of fused chunks. None: none."""
    prepass: bool = False
    """All rows are run a second time later, so all of them are charged to the recompute budget."""

    @property
    def num_rows(self) -> int:
        return self.token_ids.numel()

    @property
    def dynamic(self) -> bool:
        """True if which rows go on depends on data, so the plan cannot be cut into blocks."""
        return any(isinstance(s, Select) for s in self.steps)


def acts_before(step: Keep | Select) -> int:
    """The layer from which on the rows are fewer."""
    return step.before_layer if isinstance(step, Keep) else step.after_layer + 1


def split(plan: RequestPlan, max_rows: int) -> Iterator[RequestPlan]:
    """Cut a static plan into blocks of at most ``max_rows`` rows, in order; block i attends to the finished blocks.

    The blocks compute what the whole plan computes (chunked prefill): visibility is by order, so no row of an earlier
    block can see one of a later. Loads ride with the first block. A plan with a ``Select`` is yielded whole.
    """
    if plan.dynamic or plan.num_rows <= max_rows:
        yield plan
        return
    for start in range(0, plan.num_rows, max_rows):
        stop = min(start + max_rows, plan.num_rows)
        yield replace(
            plan,
            token_ids=plan.token_ids[start:stop],
            positions=plan.positions[start:stop],
            slots=plan.slots[start:stop],
            views=tuple(_cut_view(v, start, stop) for v in plan.views if v.start < stop and v.stop > start),
            logits=_within(plan.logits, start, stop),
            steps=tuple(replace(s, rows=_within(s.rows, start, stop)) for s in plan.steps if isinstance(s, Keep)),
            loads=plan.loads if start == 0 else (),
            saves=tuple(_cut_save(s, start, stop) for s in plan.saves if s.start < stop and s.stop > start),
            reusable=None if plan.reusable is None else plan.reusable[start:stop],
        )


def _within(rows: Tensor, start: int, stop: int) -> Tensor:
    return rows[(rows >= start) & (rows < stop)] - start


def _cut_view(view: View, start: int, stop: int) -> View:
    a, b = max(view.start, start), min(view.stop, stop)
    visible = view.visible[a - view.start : b - view.start]
    return View(a - start, b - start, view.context[: int(visible.max())], visible)


def _cut_save(save: Save, start: int, stop: int) -> Save:
    a, b = max(save.start, start), min(save.stop, stop)
    return Save(a - start, b - start, save.sink, save.offset + a - save.start)


def validate(plan: RequestPlan, layout: KVLayout, context_length: int) -> None:
    """Check the invariants every plan must keep; raises ``PlanError`` naming the broken one.

    Rows nest from layer to layer, views partition the rows, ``1 <= visible <= len(context)``, a row's own slot is
    ``context[visible - 1]``, slots are written once, positions are below the model's context length.
    """
    n = plan.num_rows
    _require(n > 0, "a plan needs at least one row")
    _require(plan.positions.numel() == n and plan.slots.numel() == n, "one position and one slot per row")
    _require(
        bool((plan.positions >= 0).all() and (plan.positions < context_length).all()),
        f"positions must be within [0, {context_length})",
    )
    _require(plan.slots.unique().numel() == n, "a slot is written by one row only")
    at = 0
    for view in plan.views:
        _require(view.start == at and view.stop > view.start, "views must partition the rows in order")
        at = view.stop
        _check_view(plan, view)
    _require(at == n, "views must cover every row")
    _check_steps(plan, layout)
    for load in plan.loads:
        sizes = {load.slots.numel(), load.positions.numel(), load.rotate_at.numel(), load.tokens.numel()}
        _require(len(sizes) == 1, "a load has one slot, position and token per entry")
        _require(0 <= load.first_layer < layout.num_layers, "a load starts at a layer of the model")
    for save in plan.saves:
        _require(0 <= save.start < save.stop <= n, "a save names rows of the plan")
        _require(not plan.steps, "saved rows must be computed in all layers")


def _check_view(plan: RequestPlan, view: View) -> None:
    visible, m = view.visible, view.context.numel()
    _require(visible.numel() == view.stop - view.start, "one visible count per row of a view")
    _require(bool((visible >= 1).all() and (visible <= m).all()), "1 <= visible <= len(context)")
    _require(bool((visible[1:] >= visible[:-1]).all()), "visible ascends within a view")
    own = view.context[visible - 1]
    _require(torch.equal(own, plan.slots[view.start : view.stop]), "a row's own slot is the last one it sees")
    _require(view.context.unique().numel() == m, "a context names a slot once")


def _check_steps(plan: RequestPlan, layout: KVLayout) -> None:
    alive = torch.arange(plan.num_rows)
    layer = 0
    for step in plan.steps:
        _require(layer <= acts_before(step) < layout.num_layers, "steps are in order of layers")
        layer = acts_before(step)
        if isinstance(step, Keep):
            _require(bool(torch.isin(step.rows, alive).all()), f"rows before layer {layer} were dropped earlier")
            _require(bool((step.rows[1:] > step.rows[:-1]).all()), "kept rows ascend")
            alive = step.rows
            continue
        _require(step.after_layer >= 1, "a check at layer 0 sees no deviation: use layer 1 or later")
        _require(0 <= step.keep <= step.candidates.numel(), "a Select keeps at most its candidates")
        _require(bool(torch.isin(step.heads, step.candidates).all()), "heads are candidates")
        _require(not torch.isin(step.always, step.candidates).any(), "always and candidates are disjoint")
        alive = torch.cat([step.always, step.candidates])
    _require(bool(torch.isin(plan.logits, alive).all()), "rows with logits must survive to the last layer")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise PlanError(f"invalid plan: {message}")
