"""Which sequences run in the next step. Knows counts, not tensors.

| state | where | leaves when |
|---|---|---|
| waiting | ``waiting``, fair between tenants, first come first served within one | its slots can be reserved |
| running | ``running`` | it finished, was aborted, or was preempted |
| preempted | ``waiting``, in front of all others | there is room for what it had |
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, Protocol, TypeVar


class Verdict(Enum):
    """What became of an attempt to start a sequence."""

    STARTED = "started"
    LATER = "later"
    """It waits for something that others don't wait for: they may overtake it."""
    NO_ROOM = "no room"
    """Whoever came later mustn't take the room it waits for."""
    GONE = "gone"
    """It can't run, and left."""


class Schedulable(Protocol):
    @property
    def pending_rows(self) -> int:
        """Rows of its next plan: 1 when it decodes."""
        ...

    @property
    def ready(self) -> bool:
        """False while its next plan would wait for loads."""
        ...

    @property
    def tenant(self) -> str: ...

    @property
    def places(self) -> int:
        """Running sequences it is, or will be once its samples part."""
        ...

    @property
    def num_prompt(self) -> int: ...


S = TypeVar("S", bound=Schedulable)


class Scheduler(Generic[S]):
    """Continuous batching: decodes always join, prefills fill what is left of the step.

    Between tenants the one that was served least goes first (virtual token counters, Sheng et al., OSDI '24): prompt tokens
    count when a request starts, answer tokens as they come. A tenant that comes back starts level with those present.
    """

    def __init__(self, max_step_rows: int, max_sequences: int = 256) -> None:
        self.max_step_rows = max_step_rows
        self.max_sequences = max_sequences
        self.waiting: deque[S] = deque()
        self.running: list[S] = []
        self._preempted: set[S] = set()
        self._served: Counter[str] = Counter()

    def add(self, sequence: S) -> None:
        present = {s.tenant for s in (*self.waiting, *self.running)}
        if sequence.tenant not in present:  # neither credit for idling nor a debt that outlives the others
            self._served = Counter({t: self._served[t] for t in present})
            self._served[sequence.tenant] = min(self._served.values(), default=0)
        self.waiting.append(sequence)

    def join(self, sequence: S) -> None:
        """Run a sequence that needs no start: another sample of one that runs."""
        self.running.append(sequence)

    def admit(self, start: Callable[[S], Verdict]) -> None:
        """Start waiting sequences, in order, until one finds no room."""
        later: set[S] = set()
        while (sequence := self._next(later)) is not None:
            if self.running and sum(s.places for s in (*self.running, sequence)) > self.max_sequences:
                return
            verdict = start(sequence)
            if verdict is Verdict.NO_ROOM:
                return
            if verdict is Verdict.LATER:
                later.add(sequence)
                continue
            if verdict is Verdict.STARTED:
                self.waiting.remove(sequence)
                self._served[sequence.tenant] += sequence.num_prompt
                self._preempted.discard(sequence)
                self.running.append(sequence)

    def _next(self, later: set[S]) -> S | None:
        """Preempted ones first; else the first in line of the tenant that was served least."""
        first: dict[str, S] = {}
        for sequence in self.waiting:
            if sequence in later:
                continue
            if sequence in self._preempted:
                return sequence
            first.setdefault(sequence.tenant, sequence)
        return min(first.values(), key=lambda s: self._served[s.tenant], default=None)

    def schedule(self) -> list[S]:
        """Sequences of the next step: all decodes, the oldest prefill, and what else fits ``max_step_rows`` rows.

        The oldest prefill always joins, whatever decodes, so that nothing starves. Those that would wait for loads stay
        out as long as others have something to do.
        """
        ready = [s for s in self.running if s.ready] or self.running[:1]
        order = sorted(ready, key=lambda s: s.pending_rows > 1)  # stable: decodes first, then by arrival
        oldest = next((s for s in order if s.pending_rows > 1), None)
        chosen: list[S] = []
        rows = 0
        for sequence in order:
            if sequence is oldest or sequence.pending_rows == 1 or rows + sequence.pending_rows <= self.max_step_rows:
                chosen.append(sequence)
                rows += sequence.pending_rows
                self._served[sequence.tenant] += sequence.pending_rows == 1
        return chosen

    def preempt(self, sequence: S) -> None:
        """From running back to the front of the line."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self._preempted.add(sequence)

    def remove(self, sequence: S) -> None:
        """Forget a sequence, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self._preempted.discard(sequence)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running
