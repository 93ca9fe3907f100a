"""A remote medium that may fail: every call ends by its deadline, is tried again where that helps, and is skipped while
the medium is known to be down.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from kvweave.core.keys import ChunkKey
from kvweave.errors import PinQuotaExceeded
from kvweave.store.base import Blob, BlobInfo, Blobs, MissReason, Pinning, PutHints, Rejected, TierError
from kvweave.store.memory_blobs import erase_listed

State = Literal["closed", "open", "half_open"]
T = TypeVar("T")

_TRANSIENT: frozenset[MissReason] = frozenset({"io", "busy"})
_FAILED: frozenset[MissReason] = frozenset({"io", "deadline"})
"""Reasons that tell against the medium. ``busy`` and ``no_memory`` say nothing of it; all others are answers."""


class Pass(NamedTuple):
    """Leave to call the medium once; given back with the outcome."""

    period: int
    successes: int


class Breaker:
    """Whether a medium is asked. Closed: yes. Open: no, for ``pause`` seconds. Half open: one call finds out. Thread-safe.

    It opens after ``in_a_row`` failures without a success in between, or if half of the last ``window`` calls failed. A
    time-out counts as ``in_a_row`` failures, so a dead medium costs one, unless another call succeeded meanwhile.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, in_a_row: int = 5, window: int = 20, pause: float = 30.0
    ) -> None:
        self._clock = clock
        self._in_a_row = in_a_row
        self._pause = pause
        self._lock = threading.Lock()
        self._state: State = "closed"
        self._period = 0
        self._since = clock()
        self._successes = 0
        self._row = 0
        self._outcomes: deque[bool] = deque(maxlen=window)
        self._transitions: Counter[State] = Counter()

    @property
    def state(self) -> State:
        return self._state

    @property
    def transitions(self) -> dict[str, int]:
        """How often each state was entered."""
        with self._lock:
            return dict(self._transitions.items())

    def enter(self) -> Pass:
        """Leave for one call; raises ``TierError("breaker")``. Each ``enter`` wants a ``leave``."""
        with self._lock:
            if self._state != "closed":
                # A probe that didn't come back within a pause is given up, so that no lost thread keeps the tier down.
                if self._clock() - self._since < self._pause:
                    raise TierError("breaker", f"{self._state}, last failure less than {self._pause:g} s ago")
                self._go("half_open")
            return Pass(self._period, self._successes)

    def leave(self, entered: Pass, outcome: Literal["ok", "failed", "timed_out", "unknown"]) -> None:
        with self._lock:
            if entered.period != self._period:
                return  # from before the last transition: old news
            if self._state == "half_open":
                self._go("closed" if outcome == "ok" else "open")
            elif outcome == "ok":
                self._successes += 1
                self._row = 0
                self._outcomes.append(True)
            elif outcome != "unknown":
                self._fail(alone=outcome == "timed_out" and entered.successes == self._successes)

    def _fail(self, alone: bool) -> None:
        self._row += self._in_a_row if alone else 1
        self._outcomes.append(False)
        full = len(self._outcomes) == self._outcomes.maxlen
        if self._row >= self._in_a_row or (full and 2 * self._outcomes.count(False) >= len(self._outcomes)):
            self._go("open")

    def _go(self, state: State) -> None:
        self._state = state
        self._transitions[state] += 1
        self._period += 1
        self._since = self._clock()
        self._row = 0
        self._outcomes.clear()


class Guarded:
    """``blobs`` behind deadlines, retries and a breaker.

    ``patience`` [s] is how long the medium may be silent: a call that failed for its deadline after that long is a
    time-out, one with less time to spare is an ordinary failure. ``attempts`` calls are made at most, with pauses around
    ``backoff`` [s], doubled each time; only ``io`` and ``busy`` are tried again, and never past the deadline. ``clock``
    must be the one that deadlines are told in.
    """

    def __init__(
        self,
        blobs: Blobs,
        *,
        patience: float = 1.0,
        attempts: int = 3,
        backoff: float = 0.02,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.blobs = blobs
        self.breaker = breaker or Breaker(clock)
        self._patience = patience
        self._attempts = attempts
        self._backoff = backoff
        self._clock = clock
        self._sleep = sleep
        self._random = random.Random()

    @property
    def name(self) -> str:
        return self.blobs.name

    @property
    def min_read(self) -> int:
        return self.blobs.min_read

    @property
    def up(self) -> bool:
        """False while calls are skipped, or one of them finds out whether they still have to be."""
        return self.breaker.state == "closed"

    def open(self, key: ChunkKey, deadline: float) -> Blob | None:
        blob = self._call(lambda: self.blobs.open(key, deadline), deadline)
        return None if blob is None else _GuardedBlob(self, blob)

    def contains(self, key: ChunkKey, deadline: float) -> bool:
        return self._call(lambda: self.blobs.contains(key, deadline), deadline)

    def was_evicted(self, key: ChunkKey) -> bool:
        return self.blobs.was_evicted(key)

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        self._call(lambda: self.blobs.put(key, value, hints, deadline), deadline)

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        self._at_once(partial(self.blobs.discard, key, reason))

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        """After a retry the count may lack what the failed call had removed already."""
        listed = list(keys)
        return self._call(lambda: self.blobs.delete(listed, deadline), deadline)

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        """Not tried again once it has begun."""
        entered = self.breaker.enter()
        outcome: Literal["ok", "failed", "unknown"] = "unknown"
        try:
            for info in self.blobs.scan(scope):
                outcome = "ok"
                yield info
            outcome = "ok"
        except TierError as error:
            outcome = "failed" if error.reason in _FAILED else "ok"
            raise
        finally:
            self.breaker.leave(entered, outcome)

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        """Page by page, so that a large scope isn't one long call that looks like a time-out."""
        return erase_listed(self, scope, deadline)

    def epoch(self, scope: bytes, deadline: float) -> int:
        return self._call(lambda: self.blobs.epoch(scope, deadline), deadline)

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        self._call(lambda: self.blobs.raise_epoch(scope, epoch, deadline), deadline)

    def pin(self, key: ChunkKey, until: float, owner: str) -> bool:
        return isinstance(self.blobs, Pinning) and self._at_once(partial(self.blobs.pin, key, until, owner))

    def unpin(self, key: ChunkKey) -> bool:
        return isinstance(self.blobs, Pinning) and self._at_once(partial(self.blobs.unpin, key))

    def ping(self, deadline: float) -> None:
        self._call(lambda: self.blobs.ping(deadline), deadline)

    def close(self) -> None:
        self.blobs.close()

    def _at_once(self, work: Callable[[], T]) -> T:
        """For what has no deadline of its own."""
        return self._call(work, self._clock() + self._patience)

    def _call(self, work: Callable[[], T], deadline: float) -> T:
        """``work()``, again if that may help; raises its last ``TierError`` or ``Rejected``."""
        for attempt in range(1, self._attempts + 1):
            if self._clock() >= deadline:
                raise TierError("deadline", "already passed")
            entered = self.breaker.enter()
            try:
                return self._once(work, entered)
            except TierError as error:
                # A jitter between a half and one and a half keeps clients from coming back all at once.
                pause = self._backoff * 2 ** (attempt - 1) * (0.5 + self._random.random())
                final = attempt == self._attempts or error.reason not in _TRANSIENT or not self.up
                if final or self._clock() + pause >= deadline:
                    raise
            self._sleep(pause)
        raise AssertionError("attempts is at least one")

    def _once(self, work: Callable[[], T], entered: Pass) -> T:
        """One call to the medium, of which the breaker learns whatever happens."""
        started = self._clock()
        outcome: Literal["ok", "failed", "timed_out", "unknown"] = "failed"
        try:
            result = work()
            outcome = "ok"
        except TierError as error:
            if error.reason not in _FAILED:
                outcome = "unknown" if error.reason in ("busy", "no_memory") else "ok"
            elif error.reason == "deadline" and self._clock() - started >= self._patience:
                outcome = "timed_out"
            raise
        except (Rejected, PinQuotaExceeded):
            outcome = "ok"
            raise
        finally:
            self.breaker.leave(entered, outcome)
        return result


class _GuardedBlob:
    def __init__(self, guard: Guarded, blob: Blob) -> None:
        self._guard = guard
        self._blob = blob

    @property
    def size(self) -> int:
        return self._blob.size

    @contextmanager
    def read(self, offset: int, length: int, deadline: float) -> Iterator[memoryview]:
        with ExitStack() as stack:
            # Only entering asks the medium: what the caller does with the bytes isn't the medium's failure.
            yield self._guard._call(lambda: stack.enter_context(self._blob.read(offset, length, deadline)), deadline)

    def close(self) -> None:
        self._blob.close()
