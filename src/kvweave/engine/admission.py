"""From waiting to running: ask the caches, reserve slots, decide what is reused. Where there is no room, preempt."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from kvweave.core.keys import Scope
from kvweave.engine.accounting import Counters
from kvweave.engine.lookup import Lookup, find_reuse, without
from kvweave.engine.parts import EngineParts
from kvweave.engine.profile import Profile
from kvweave.engine.scheduler import Scheduler, Verdict
from kvweave.engine.sequence import Request, Sequence
from kvweave.engine.swap import SwapSpace
from kvweave.errors import IntegrityError
from kvweave.index.chunks import Found
from kvweave.index.prefix_tree import PrefixTree
from kvweave.kv.allocator import SlotAllocator
from kvweave.reuse.controller import decide, exact_loads_pay
from kvweave.reuse.prefix import Prefix

_LOOKUP_THREADS = 4
_LOOK_AHEAD = 16  # waiting requests whose chunks are looked up in advance
_HEADROOM = 256  # answer tokens that slots are reserved for at a time
_PROBE = 20  # one of so many requests for which loading was expected to lose loads all the same


class Admission:
    """Gives sequences their slots and their lookup, and takes slots back. ``activity`` is set when a lookup is done."""

    def __init__(
        self,
        parts: EngineParts,
        scheduler: Scheduler[Sequence],
        profile: Profile,
        counters: Counters,
        activity: threading.Event,
    ) -> None:
        self.parts = parts
        self.allocator = SlotAllocator(parts.pool.num_slots)
        self.tree = PrefixTree(self.allocator)
        self.swap = SwapSpace(parts.pool, parts.swap_bytes)
        self._scheduler = scheduler
        self._profile = profile
        self._counters = counters
        self._activity = activity
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="kvweave-lookup")
        self._declined = itertools.count(1)

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self.tree.clear()

    def look_ahead(self, waiting: deque[Sequence]) -> None:
        """Lookups of the first requests in line; not of all, because what is found holds descriptors."""
        for sequence in itertools.islice(waiting, _LOOK_AHEAD):
            if sequence.looking is None and sequence.swapped is None and sequence.request.technique.reuse != "off":
                self._look_up(sequence)

    def _look_up(self, sequence: Sequence) -> None:
        """Ask the caches, on another thread if a tier may be slow; the request isn't admitted before they answered."""
        if not self.parts.chunks.store.immediate:
            sequence.looking = self._lookups.submit(self._find, sequence.request)
            sequence.looking.add_done_callback(lambda _: self._activity.set())
            sequence.looked_since = time.monotonic()
            return
        sequence.looking = Future()
        try:
            sequence.looking.set_result(self._find(sequence.request))
        except Exception as error:  # this request's own, like one on the other threads
            sequence.looking.set_exception(error)

    def _find(self, request: Request) -> Found:
        chunks = self.parts.chunks
        return chunks.lookup(request.prompt, request.anchors, chunks.scope(request.tenant, request.salt))

    def start(self, sequence: Sequence) -> Verdict:
        """Reserve slots, and compile what is cached into a lookup; or say why not yet."""
        if sequence.swapped is not None:
            return self._resume(sequence)
        if not self._answered(sequence):
            return Verdict.LATER
        shared = self._shared_prefix(sequence)
        self.allocator.share(shared)  # before anything is evicted to make room
        fresh = self.reserve(self._wanted(sequence) - shared.numel())
        if fresh is None:
            self.allocator.release(shared)
            return Verdict.NO_ROOM
        sequence.slots = torch.cat([shared, fresh])
        sequence.note("queue_ms")
        sequence.lookup = find_reuse(
            sequence,
            shared.numel(),
            layout=self.parts.pool.layout,
            max_rows=self.parts.max_step_rows,
            min_reuse_tokens=self.parts.min_reuse_tokens,
        )
        self._control(sequence.lookup)
        sequence.note("lookup_ms")
        return Verdict.STARTED

    def _resume(self, sequence: Sequence) -> Verdict:
        slots = self.reserve(self._wanted(sequence))
        if slots is None or sequence.swapped is None:
            return Verdict.NO_ROOM
        sequence.slots = slots
        self.swap.back(sequence.swapped, slots[: sequence.num_written])
        sequence.swapped = None
        return Verdict.STARTED

    @staticmethod
    def _wanted(sequence: Sequence) -> int:
        """Slots to start with: what has KV, and the next part of the answer."""
        return min(sequence.most_slots, sequence.num_written + _HEADROOM)

    def _answered(self, sequence: Sequence) -> bool:
        """True if the caches have answered, or had their time; asked again if the tenant was erased meanwhile."""
        if sequence.request.technique.reuse == "off" or sequence.gave_up:
            return True
        if sequence.found is None:
            late = sequence.looking is not None and time.monotonic() - sequence.looked_since > self.parts.lookup_timeout
            sequence.gave_up = late
            return late
        if not self.parts.chunks.store.current(sequence.found.scope):
            sequence.found.close()
            self._look_up(sequence)
        return sequence.found is not None

    def _control(self, lookup: Lookup) -> None:
        """Let the controller set the ratio, or decline loads that would lose."""
        costs = None if self.parts.controller is None else self._profile.costs()
        if costs is None or self.parts.controller is None:
            return
        request = lookup.plan_request
        slow = [hit.start for hit in request.exact_hits if hit.tier in costs.bandwidth]
        if slow and not exact_loads_pay(request, costs) and not self._probe():
            lookup.plan_request = request = without(request, slow)
            lookup.fallback_reason = lookup.fallback_reason or "no_gain"
        if lookup.ran != "fused":
            return
        decided = decide(self.parts.controller, lookup.technique, request, costs)
        if decided is None:
            return
        lookup.technique, lookup.decision = decided
        if lookup.decision.run == "exact" and not self._probe():
            lookup.plan_request = replace(request, hits=())
            lookup.technique, lookup.ran, lookup.fallback_reason = Prefix(), "exact", "no_gain"

    def _probe(self) -> bool:
        """Now and then a load that is expected to lose is tried: the tier may have got better."""
        return next(self._declined) % _PROBE == 0

    def reserve(self, n: int, behind: int | None = None) -> Tensor | None:
        """``n`` private slots, evicting prefixes nobody uses if need be; None if running requests hold too many.

        Pinned prefixes go only if nothing runs that could make room: no request waits for ever.
        """
        for pinned in (False, True):
            if n > self.allocator.num_free and not (pinned and self._scheduler.running):
                self.tree.evict(n - self.allocator.num_free, pinned=pinned)
        return self.allocator.allocate(n, behind)

    def _shared_prefix(self, sequence: Sequence) -> Tensor:
        if sequence.found is None:
            return torch.empty(0, dtype=torch.int64)
        computed = max(1, sequence.request.keep_logits)  # tokens that need logits are always computed
        return self.tree.match(sequence.prompt_ids[:-computed], namespace(sequence.found.scope))

    def grow(self, sequence: Sequence) -> None:
        """Give a decoding sequence the slot of its next token; while there is none, the youngest request gives way."""
        while sequence in self._scheduler.running and sequence.slots.numel() <= sequence.num_written:
            last = int(sequence.slots[-1])
            room = min(_HEADROOM, sequence.most_slots - sequence.slots.numel())
            fresh = self.reserve(room, last) if room <= self.allocator.num_free else self.reserve(1, last)
            if fresh is not None:
                sequence.slots = torch.cat([sequence.slots, fresh])
                return
            victim = max(self._scheduler.running, key=lambda s: s.arrived)
            if len(self._scheduler.running) == 1:
                raise IntegrityError("a sequence that runs alone has no room, although it was checked that it fits")
            self.preempt(victim)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slots. Its KV waits in host memory if there is room, else it is computed again."""
        self._counters.preemptions += 1
        self._scheduler.preempt(sequence)
        written = 0 if sequence.pending else sequence.num_written
        if written:
            sequence.swapped = self.swap.out(sequence.slots[:written])
        if sequence.swapped is None:
            self._counters.wasted["preemption"] += sequence.computed
            sequence.close_loads()
            sequence.start_over()
        self.allocator.release(sequence.slots)
        sequence.slots = sequence.slots[:0]

    def leave(self, sequence: Sequence) -> None:
        """Give back all it has."""
        self.allocator.release(sequence.slots)
        sequence.slots = sequence.slots[:0]
        if sequence.swapped is not None:
            self.swap.drop(sequence.swapped)
            sequence.swapped = None
        sequence.close_loads()

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` unless every slot reference belongs to a running request or to the tree."""
        self.allocator.check_integrity()
        held = [s.slots for s in self._scheduler.running] + [self.tree.slots_held()]
        counted = torch.bincount(torch.cat(held), minlength=self.allocator.num_slots)
        owners = torch.from_numpy(self.allocator.owners(torch.arange(self.allocator.num_slots))).long()
        if not torch.equal(counted, owners):
            raise IntegrityError("slot references and their owners disagree")
        swapped = sum(s.swapped.size for s in self._scheduler.waiting if s.swapped is not None)
        if swapped != self.swap.used:
            raise IntegrityError("swapped KV and its owners disagree")


def namespace(scope: Scope) -> str:
    """A scope's name in the prefix tree: with its key, so that an erasure changes it."""
    return f"{scope.tag.hex()}/{scope.key.hex()}"
