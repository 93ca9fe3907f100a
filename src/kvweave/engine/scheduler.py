"""Which sequences run in the next step. Knows counts, not tensors.

| state | where | leaves when |
|---|---|---|
| waiting | ``waiting``, first come first served | its slots can be reserved |
| running | ``running`` | it finished or was aborted |

A sequence reserves the slots of its prompt and its longest answer when it starts, so it can never be stuck half-way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    @property
    def pending_rows(self) -> int:
        """Rows of its next plan: 1 when it decodes."""
        ...

    @property
    def ready(self) -> bool:
        """False while its next plan would wait for loads."""
        ...


S = TypeVar("S", bound=Schedulable)


class Scheduler(Generic[S]):
    """Continuous batching: decodes always join, prefills fill what is left of the step."""

    def __init__(self, max_step_rows: int) -> None:
        self.max_step_rows = max_step_rows
        self.waiting: deque[S] = deque()
        self.running: list[S] = []

    def add(self, sequence: S) -> None:
        self.waiting.append(sequence)

    def admit(self, start: Callable[[S], bool]) -> None:
        """Start waiting sequences in order; the first whose ``start`` says no ends the round, so none is overtaken.

        ``start`` may remove a sequence that can't run at all; it then doesn't join the running ones.
        """
        while self.waiting:
            sequence = self.waiting[0]
            if not start(sequence):
                return
            if self.waiting and self.waiting[0] is sequence:
                self.running.append(self.waiting.popleft())

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
        return chosen

    def remove(self, sequence: S) -> None:
        """Forget a sequence, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running
