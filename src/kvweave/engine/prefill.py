"""Runs a sequence's prompt through its technique's plans, and back to a safer path where one of them fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvweave.core.plan import Keep, Load, RequestPlan, split, validate
from kvweave.engine.accounting import Counters, note_loads
from kvweave.engine.executor import PlanResult
from kvweave.engine.lookup import without
from kvweave.engine.parts import EngineParts
from kvweave.engine.profile import Profile
from kvweave.engine.sampler import prompt_logprobs
from kvweave.engine.sequence import Lookup, Sequence
from kvweave.errors import PlanError
from kvweave.kv.allocator import SlotAllocator
from kvweave.reuse.base import FallBack
from kvweave.reuse.prefix import Prefix
from kvweave.store.base import DAMAGED

_LEAST_TIMEOUT = 0.05  # seconds: below that, a busy scheduler would be taken for a slow tier
_RESTARTS = 2  # single records that may fail in one request before all of their tier is given up for it


class Prefills:
    """Prompts on their way."""

    def __init__(self, parts: EngineParts, allocator: SlotAllocator, profile: Profile, counters: Counters) -> None:
        self.parts = parts
        self._allocator = allocator
        self._profile = profile
        self._counters = counters
        self._tickets = itertools.count(1)

    def begin(self, sequence: Sequence) -> None:
        """Compile the first plan; behind the technique's own, what was answered before a preemption is computed again."""
        lookup = sequence.looked_up
        answered = sequence.output_ids[:-1]
        replayed = [sequence.append_plan(answered, sequence.num_prompt)] if answered else []
        sequence.plans = itertools.chain(lookup.technique.plan(lookup.plan_request), replayed)
        self._next_plan(sequence)

    def advance(self, sequence: Sequence, result: PlanResult) -> bool:
        """Take note of a step; True if the prompt is done."""
        if result.lost is not None:
            self._restart_without(sequence, result.lost, result.lost_reason)
            return False
        if not result.finite:
            self._restart_exact(sequence, "high_deviation")
            return False
        plan = sequence.pending.popleft()
        if sequence.request.keep_logits:
            sequence.prompt_logits.append(result.logits)
        if sequence.request.prompt_logprobs is not None:
            _note_logprobs(sequence, plan, result.logits, sequence.request.prompt_logprobs)
        if not sequence.pending:
            self._next_plan(sequence)
        return not sequence.pending

    def _next_plan(self, sequence: Sequence) -> None:
        """Take the next plan, if there is one, in blocks."""
        try:
            plan = next(sequence.plans, None)
        except FallBack as doubt:
            self._restart_exact(sequence, doubt.reason)
            return
        if plan is None:
            return
        self._check(plan, sequence.looked_up)
        if sequence.request.prompt_logprobs is not None:
            plan = replace(plan, logits=_survivors(plan))
        ticket, timeout = next(self._tickets), self._load_timeout(sequence.looked_up)
        plan = replace(plan, loads=tuple(load.begin(ticket, timeout) for load in plan.loads))
        sequence.loads.extend(plan.loads)
        sequence.pending.extend(split(plan, self.parts.prefill_rows))

    def _check(self, plan: RequestPlan, lookup: Lookup) -> None:
        try:
            validate(plan, self.parts.pool.layout, self.parts.context_length)
            written = torch.cat([plan.slots, *(load.slots for load in plan.loads)])
            if not self._allocator.writable(written):
                raise PlanError("invalid plan: it writes to a shared slot")
        except PlanError as error:
            raise PlanError(f"technique '{lookup.technique.name}': {error}") from error

    def _load_timeout(self, lookup: Lookup) -> float:
        """Seconds after which a load is given up: half as long again as expected, and a tenth of computing everything."""
        decision = lookup.decision
        if decision is None:
            return self.parts.load_timeout
        expected = 1.5 * decision.load_ms + 0.1 * decision.predicted_full_ms
        return min(self.parts.load_timeout, _LEAST_TIMEOUT + expected / 1e3)

    def _restart_without(self, sequence: Sequence, lost: Load, reason: str) -> None:
        """A load failed: its chunk is computed instead. What is left may still be worth its technique."""
        lookup, request = sequence.looked_up, sequence.looked_up.plan_request
        sequence.restarts += 1
        tier = "" if lost.reader is None else lost.reader.tier
        broken = [h for h in (*request.exact_hits, *request.hits) if h.start <= int(lost.positions[0]) < h.stop]
        if reason not in DAMAGED or sequence.restarts > _RESTARTS:  # not one record is bad but its medium
            broken += [h for h in (*request.exact_hits, *request.hits) if h.tier == tier]
        if reason == "deadline" and lost.reader is not None and lost.reader.jobs:  # so slow is a rate as well
            note_loads([lost], self._profile, self.parts.pool.layout, 1, at_least=self._load_timeout(lookup))
        lookup.lose(without(request, {h.start for h in broken}), broken, reason)
        self._counters.lost_loads[tier, reason] += 1
        if lookup.ran == "fused" and sum(h.length for h in lookup.plan_request.hits) < max(1, self.parts.min_reuse_tokens):
            self._restart_exact(sequence, "load_timeout" if reason == "deadline" else "bad_record")
            return
        self._restart(sequence, "abandoned_load")

    def _restart_exact(self, sequence: Sequence, reason: str) -> None:
        """Doubt: (re)start on the exact path, over the same slots."""
        lookup = sequence.looked_up
        lookup.plan_request = replace(lookup.plan_request, hits=())
        lookup.technique, lookup.ran, lookup.fallback_reason = Prefix(), "exact", reason
        self._restart(sequence, reason)

    def _restart(self, sequence: Sequence, cause: str) -> None:
        self._counters.wasted[cause] += sequence.computed
        sequence.computed = 0
        sequence.close_readers()
        sequence.forget_counts()
        self.begin(sequence)


def _survivors(plan: RequestPlan) -> Tensor:
    """Rows that are computed in all layers, whatever is selected on the way."""
    if plan.dynamic:
        return plan.logits
    kept = [step.rows for step in plan.steps if isinstance(step, Keep)]
    return kept[-1] if kept else torch.arange(plan.num_rows)


def _note_logprobs(sequence: Sequence, plan: RequestPlan, logits: Tensor, top: int) -> None:
    """Row at order i predicts token i + 1 of the prompt."""
    following = plan.positions[plan.logits] + 1
    inside = following < sequence.num_prompt
    orders = following[inside].tolist()
    if orders:
        ids = torch.tensor([sequence.prompt_ids[order] for order in orders])
        found = prompt_logprobs(logits[inside.to(logits.device)], ids, top)
        sequence.prompt_logprobs.update(zip(orders, found, strict=True))


def orders_published(sequence: Sequence, new: int, exact: int) -> Iterator[int]:
    """Orders of the prompt's last ``new`` exact tokens that were computed, not loaded."""
    request = sequence.looked_up.plan_request
    loaded = {order for hit in request.exact_hits for order in range(hit.start, hit.stop)}
    stop = min(exact, sequence.num_prompt)
    return (order for order in range(max(stop - new, request.resident), stop) if order not in loaded)
