"""Runs any batch of plans in one forward pass of the model.

Per layer: narrow the rows (``Keep``, resolved ``Select``), then inside attention: rotate -> load -> score -> write ->
attend. Prefill, decode, fusion and several requests at once are the same call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvweave.attention import AttentionBackend, LayerOptions, ViewRows
from kvweave.core.batch import Batch, build_batch
from kvweave.core.plan import Keep, LayerReader, Load, RequestPlan, Select
from kvweave.core.report import Deviation
from kvweave.core.spec import LayerSpec
from kvweave.errors import LoadFailed
from kvweave.kv.pool import KVPool, SlotIndex
from kvweave.kv.rotary import PositionTables, Rotary
from kvweave.models.adapter import DecoderAdapter
from kvweave.reuse.selectors.base import choose


@dataclass(frozen=True)
class PlanResult:
    """What one plan of a step produced."""

    logits: Tensor
    """[k, vocabulary] for the plan's ``logits`` rows."""
    rows_per_layer: tuple[int, ...]
    """Rows of this plan computed in each layer."""
    recomputed: Tensor
    """[k] orders of the tokens of fused chunks that went on behind the first narrowing."""
    charged: int
    """Row-layers charged to the recompute budget, layers run in full and prepasses included."""
    deviations: tuple[Deviation, ...] = ()
    finite: bool = True
    """False if a KV deviation was not finite: the result must not be used."""
    lost: Load | None = None
    """A load that failed, and ``lost_reason`` why: the result must not be used."""
    lost_reason: str = ""
    load_wait: float = 0.0
    """Seconds in which the step waited for this plan's loads."""


class Executor:
    """Runs plans over one pool. Not thread-safe: one step at a time."""

    def __init__(self, adapter: DecoderAdapter, pool: KVPool, attention: AttentionBackend) -> None:
        self.adapter = adapter
        self.pool = pool
        self.attention = attention

    @torch.inference_mode()
    def run(self, plans: Sequence[RequestPlan]) -> list[PlanResult]:
        """One forward pass over all plans; results in the same order."""
        batch = build_batch(plans)
        step = _Step(batch, self.pool, self.adapter.rotary, self.attention)
        device = self.pool.device
        try:
            logits = self.adapter.forward(batch.token_ids.to(device), batch.positions.to(device), step)
        except _NoRowsLeft as stop:
            step.load_rest(stop.layer)
            logits = None
        except _AllLost:
            logits = None
        if logits is None:
            logits = torch.empty(0, self.adapter.vocab_size, dtype=self.pool.layout.dtype, device=device)
        return step.results(logits)


class _NoRowsLeft(Exception):
    """No row enters ``layer``: a block of a prompt of which everything is reused from there on."""

    def __init__(self, layer: int) -> None:
        self.layer = layer


class _AllLost(Exception):
    """Loads of every plan failed: nothing of this forward pass will be used."""


@dataclass
class _PlanState:
    """Rows of one plan that are still computed, and what was counted on the way."""

    plan: RequestPlan
    alive: Tensor
    """Row indices of the plan, ascending."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> rows that a resolved ``Select`` sends there."""
    rows: list[int] = field(default_factory=list)
    reusable: list[int] = field(default_factory=list)
    kept: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Reusable rows behind the first narrowing; all of them where nothing narrows."""
    deviations: list[Deviation] = field(default_factory=list)
    finite: bool = True
    lost: Load | None = None
    lost_reason: str = ""
    load_wait: float = 0.0

    def rows_before(self, layer: int) -> Tensor | None:
        if layer in self.chosen:
            return self.chosen[layer]
        rows = [s.rows for s in self.plan.steps if isinstance(s, Keep) and s.before_layer == layer]
        return rows[-1] if rows else None

    def count(self) -> None:
        self.rows.append(self.alive.numel())
        mask = self.plan.reusable
        rows = self.alive[:0] if mask is None else self.alive[mask[self.alive]]
        if not self.reusable or rows.numel() < self.reusable[0] == self.kept.numel():
            self.kept = rows
        self.reusable.append(rows.numel())

    @property
    def charged(self) -> int:
        return sum(self.rows if self.plan.prepass else self.reusable)

    @property
    def recomputed(self) -> Tensor:
        return self.plan.positions[self.kept[:0] if self.plan.prepass else self.kept]


@dataclass
class _Loads:
    """All loads of a step that start at one layer: one rotation and one write a layer, however many chunks there are."""

    parts: list[tuple[_PlanState, Load, LayerReader]]
    index: SlotIndex
    tables: PositionTables

    def fetch(self, layer: int, spec: LayerSpec, pool: KVPool) -> tuple[Tensor, Tensor]:
        """Unrotated K and V [kv_heads, tokens, dim] of one layer, in the order of ``index``."""
        stored = [_take(*part, layer, spec, pool.layout.dtype) for part in self.parts]
        keys, values = ([kv[i].to(pool.device) for kv in stored] for i in (0, 1))
        return (keys[0], values[0]) if len(stored) == 1 else (torch.cat(keys, 1), torch.cat(values, 1))


def _take(
    state: _PlanState, load: Load, reader: LayerReader, layer: int, spec: LayerSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A layer of one load. If it fails its plan is lost, which others must not feel: zeros stand in for the rest of it."""
    if state.lost is None:
        start = time.perf_counter()
        try:
            return reader.layer(layer)
        except LoadFailed as failure:
            state.lost, state.lost_reason = load, failure.reason
        finally:
            state.load_wait += time.perf_counter() - start if reader.jobs else 0.0
    n = load.tokens.numel()
    dims = (spec.key_dim, spec.value_dim)
    keys, values = (torch.zeros(spec.num_kv_heads, n, dim, dtype=dtype) for dim in dims)
    return keys, values


class _Step:
    """The ``LayerDriver`` of one forward pass."""

    def __init__(self, batch: Batch, pool: KVPool, rotary: Rotary, attention: AttentionBackend) -> None:
        self.batch = batch
        self.pool = pool
        self.attention = attention
        self.states = [_PlanState(p, torch.arange(p.num_rows)) for p in batch.plans]
        self.tables = rotary.at(batch.positions.to(pool.device))
        self.loads = self._prepare_loads(rotary)
        self.contexts = {id(v): SlotIndex.of(v.context, pool.device) for p in batch.plans for v in p.views}
        pool.positions[batch.slots.to(pool.device)] = batch.positions.to(pool.device)
        self._arrange()

    def _prepare_loads(self, rotary: Rotary) -> dict[int, _Loads]:
        """Loads by the layer they start at."""
        device = self.pool.device
        grouped: dict[int, list[tuple[_PlanState, Load, LayerReader]]] = {}
        for state in self.states:
            for load in state.plan.loads:
                reader = load.reader or load.source.read(load.tokens, load.first_layer, 0, math.inf)
                grouped.setdefault(load.first_layer, []).append((state, load, reader))
        prepared = {}
        for first, parts in grouped.items():
            slots = torch.cat([load.slots for _, load, _ in parts])
            self.pool.positions[slots.to(device)] = torch.cat([load.positions for _, load, _ in parts]).to(device)
            tables = rotary.at(torch.cat([load.rotate_at for _, load, _ in parts]).to(device))
            prepared[first] = _Loads(parts, SlotIndex.of(slots, device), tables)
        return prepared

    def _arrange(self) -> None:
        """Everything that depends on which rows are alive: write slots, views, attention blocks."""
        alive = [state.alive for state in self.states]
        slots = [self.batch.slots[offset + rows] for offset, rows in zip(self.batch.offsets, alive, strict=False)]
        self.write_index = SlotIndex.of(torch.cat(slots), self.pool.device)
        self.prepared = self.attention.prepare(self._views(alive), self.pool)

    def _views(self, alive: list[Tensor]) -> list[ViewRows]:
        """The plans' views of these rows, which are numbered one behind the other."""
        views, at = [], 0
        for state, kept in zip(self.states, alive, strict=True):
            plan = state.plan
            for view in plan.views:
                a, b = torch.searchsorted(kept, torch.tensor([view.start, view.stop])).tolist()
                if a == b:
                    continue
                rows = kept[a:b]
                visible = view.visible[rows - view.start]
                views.append(ViewRows(at + a, at + b, self.contexts[id(view)], visible, plan.positions[rows]))
            at += kept.numel()
        return views

    def narrow(self, layer: int) -> Tensor | None:
        index = self._index_of(self._rows_into(layer))
        if layer == self.pool.layout.num_layers:
            return index
        if index is not None:
            if not index.numel():
                raise _NoRowsLeft(layer)
            for state in self.states:
                target = state.rows_before(layer)
                state.alive = state.alive if target is None else target
            self.tables = self.tables.narrow(index)
            self._arrange()
        for state in self.states:
            state.count()
        return index

    def _rows_into(self, layer: int) -> list[Tensor] | None:
        """Rows of each plan that enter ``layer`` (the final norm: those with logits); None if all of them do."""
        if layer == self.pool.layout.num_layers:
            return [state.plan.logits for state in self.states]
        targets = [state.rows_before(layer) for state in self.states]
        rows = [s.alive if t is None else t for s, t in zip(self.states, targets, strict=True)]
        same = all(r.numel() == s.alive.numel() for r, s in zip(rows, self.states, strict=True))
        return None if same else rows

    def _index_of(self, rows: list[Tensor] | None) -> Tensor | None:
        """Where these rows stand among the rows that are alive."""
        if rows is None:
            return None
        found, at = [], 0
        for state, wanted in zip(self.states, rows, strict=True):
            found.append(torch.searchsorted(state.alive, wanted) + at)
            at += state.alive.numel()
        return torch.cat(found).to(self.pool.device)

    def load_rest(self, first: int) -> None:
        """Loads of the layers from ``first`` on, which no row walks through any more."""
        for state in self.states:
            state.alive = state.alive[:0]
        for layer in range(first, self.pool.layout.num_layers):
            self._load_layer(layer)
            for state in self.states:
                state.count()

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        rotated_q, rotated_k = self.tables.rotate(layer, queries, keys)
        self._load_layer(layer)
        self._select(layer, rotated_k, values)
        self.pool.write(layer, self.write_index, rotated_k, values)
        self._save(layer, keys, values)
        out = self._attend(layer, rotated_q, LayerOptions(**options))
        self._observe(layer, rotated_q, options["scaling"])
        return out

    def _attend(self, layer: int, queries: Tensor, options: LayerOptions) -> Tensor:
        """Only rows that go on attend: nobody reads what the others would get (zeros stand in for it)."""
        going = self._rows_into(layer + 1)
        index = self._index_of(going)
        if going is None or index is None:
            return self.attention.run(self.prepared, layer, queries, self.pool, options)
        spec = self.pool.layout.layers[layer]
        out = queries.new_zeros(queries.shape[1], spec.num_heads, spec.value_dim)
        if index.numel():
            prepared = self.attention.prepare(self._views(going), self.pool)
            out[index] = self.attention.run(prepared, layer, queries[:, index], self.pool, options)
        return out

    def _load_layer(self, layer: int) -> None:
        for first, loads in self.loads.items():
            if layer >= first:
                keys, values = loads.fetch(layer, self.pool.layout.layers[layer], self.pool)
                self.pool.write(layer, loads.index, loads.tables.rotate_keys(layer, keys), values)
        if all(state.lost is not None for state in self.states):
            raise _AllLost

    def _select(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Resolve the ``Select`` steps that look at this layer, before anything of it is overwritten."""
        at = 0
        for state in self.states:
            for step in state.plan.steps:
                if isinstance(step, Select) and step.after_layer == layer:
                    self._resolve(state, step, layer, keys, values, at)
            at += state.alive.numel()

    def _resolve(self, state: _PlanState, step: Select, layer: int, keys: Tensor, values: Tensor, at: int) -> None:
        candidates = step.candidates[torch.isin(step.candidates, state.alive)]
        index = (torch.searchsorted(state.alive, candidates) + at).to(self.pool.device)
        old_k, old_v = self.pool.read(layer, SlotIndex.of(state.plan.slots[candidates], self.pool.device))
        scores = step.scorer.score(keys[:, index], values[:, index], old_k, old_v).cpu()
        state.finite &= bool(torch.isfinite(scores).all())
        chosen = choose(torch.nan_to_num(scores), step.keep, always=torch.isin(candidates, step.heads))
        rows = torch.cat([step.always, candidates[chosen]]).sort().values
        state.chosen[layer + 1] = rows
        state.deviations.append(_deviation(layer, scores, chosen))

    def _save(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for state, offset in zip(self.states, self.batch.offsets, strict=False):
            for save in state.plan.saves:  # plans that save rows never narrow, so row = offset + index
                rows = slice(offset + save.start, offset + save.stop)
                target = slice(save.offset, save.offset + save.stop - save.start)
                save.sink.put(layer, target, keys[:, rows], values[:, rows])

    def _observe(self, layer: int, queries: Tensor, scaling: float) -> None:
        at = 0
        for state in self.states:
            plan, n = state.plan, state.alive.numel()
            if plan.observer is not None:
                (view,) = plan.views
                keys, _ = self.pool.read(layer, self.contexts[id(view)])
                plan.observer.observe(layer, queries[:, at : at + n], keys, view.visible, scaling)
            at += n

    def results(self, logits: Tensor) -> list[PlanResult]:
        sizes = [s.plan.logits.numel() for s in self.states] if logits.shape[0] else [0] * len(self.states)
        return [
            PlanResult(
                logits=part,
                rows_per_layer=tuple(s.rows),
                recomputed=s.recomputed,
                charged=s.charged,
                deviations=tuple(s.deviations),
                finite=s.finite,
                lost=s.lost,
                lost_reason=s.lost_reason,
                load_wait=s.load_wait,
            )
            for s, part in zip(self.states, logits.split(sizes), strict=True)
        ]


def _deviation(layer: int, scores: Tensor, chosen: Tensor) -> Deviation:
    if not scores.numel():
        return Deviation(layer, 0.0, 0.0, 0.0, 0.0, 0.0)
    rest = torch.ones_like(scores, dtype=torch.bool)
    rest[chosen] = False
    return Deviation(
        layer=layer,
        mean=float(scores.mean()),
        p95=float(scores.kthvalue(max(1, math.ceil(0.95 * scores.numel()))).values),
        max=float(scores.max()),
        chosen=chosen.numel() / scores.numel(),
        max_unchosen=float(scores[rest].max()) if bool(rest.any()) else 0.0,
    )
