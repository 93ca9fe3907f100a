"""Deadlines, retries and the breaker, on a clock that the tests turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvweave.core.keys import ChunkKey
from kvweave.errors import PinQuotaExceeded
from kvweave.store.base import MissReason, PutHints, Rejected, TierError
from kvweave.store.guard import Breaker, Guarded, Pass
from kvweave.store.memory_blobs import MemoryBlobs

KEY = ChunkKey(bytes(8), bytes(8), bytes(16))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Scripted(MemoryBlobs):
    """Opens end as told: a reason to fail with, after so many seconds."""

    def __init__(self, clock: Clock, *script: tuple[MissReason | None, float]) -> None:
        super().__init__()
        self.clock = clock
        self.script = list(script)
        self.calls = 0

    def open(self, key: ChunkKey, deadline: float) -> None:
        self.calls += 1
        reason, seconds = self.script.pop(0) if self.script else (None, 0.0)
        self.clock.now += seconds
        if reason is not None:
            raise TierError(reason)


def reason_of(work: Callable[[], object]) -> str:
    try:
        work()
    except TierError as error:
        return error.reason
    return "ok"


def guard(*script: tuple[MissReason | None, float], **options: float) -> tuple[Guarded, Scripted, Clock]:
    clock = Clock()
    blobs = Scripted(clock, *script)
    return Guarded(blobs, clock=clock, sleep=clock.sleep, **options), blobs, clock


def test_what_may_pass_is_tried_again() -> None:
    guarded, blobs, clock = guard(("io", 0), ("busy", 0))
    assert guarded.open(KEY, clock.now + 1) is None
    assert blobs.calls == 3
    assert 0.01 <= clock.slept[0] <= 0.03
    assert 0.02 <= clock.slept[1] <= 0.06


@pytest.mark.parametrize("reason", ["absent", "checksum", "short", "deadline", "no_memory", "evicted", "version"])
def test_what_will_not_change_is_not_tried_again(reason: MissReason) -> None:
    guarded, blobs, clock = guard((reason, 0))
    assert reason_of(lambda: guarded.open(KEY, clock.now + 1)) == reason
    assert blobs.calls == 1


def test_three_attempts_are_all() -> None:
    guarded, blobs, clock = guard(*[("io", 0)] * 9)
    assert reason_of(lambda: guarded.open(KEY, clock.now + 1)) == "io"
    assert blobs.calls == 3


@given(st.lists(st.tuples(st.sampled_from(["io", "busy"]), st.floats(0, 0.2)), max_size=8), st.floats(0.001, 0.5))
@settings(max_examples=200, deadline=None)
def test_retries_never_go_past_the_deadline(script: list[tuple[MissReason, float]], left: float) -> None:
    guarded, blobs, clock = guard(*script, attempts=8, backoff=0.05)
    deadline = clock.now + left
    begun: list[float] = []
    opened = blobs.open
    blobs.open = lambda key, until: (begun.append(clock.now), opened(key, until))[1]  # type: ignore[method-assign,assignment]
    reason_of(lambda: guarded.open(KEY, deadline))
    # A call may last; none begins after the deadline, and no pause ends after it.
    assert all(at < deadline for at in begun)
    assert clock.now - sum(seconds for _, seconds in script[: blobs.calls]) <= deadline


def test_a_deadline_that_has_passed_costs_nothing_and_says_nothing() -> None:
    guarded, blobs, clock = guard()
    for _ in range(10):
        assert reason_of(lambda: guarded.open(KEY, clock.now)) == "deadline"
    assert blobs.calls == 0
    assert guarded.up


def test_a_dead_medium_costs_one_timeout() -> None:
    guarded, blobs, clock = guard(("deadline", 1.0), ("deadline", 1.0))
    assert reason_of(lambda: guarded.open(KEY, clock.now + 1)) == "deadline"
    assert not guarded.up
    for _ in range(100):
        assert reason_of(lambda: guarded.open(KEY, clock.now + 1)) == "breaker"
    assert blobs.calls == 1
    clock.now += 30
    assert reason_of(lambda: guarded.open(KEY, clock.now + 1)) == "deadline"  # the probe
    assert reason_of(lambda: guarded.open(KEY, clock.now + 1)) == "breaker"
    clock.now += 30
    assert reason_of(lambda: guarded.open(KEY, clock.now + 1)) == "ok"
    assert guarded.up
    assert guarded.breaker.transitions == {"open": 2, "half_open": 2, "closed": 1}


def test_a_caller_in_a_hurry_counts_once() -> None:
    guarded, _, clock = guard(*[("deadline", 0.1)] * 4, (None, 0), *[("deadline", 0.1)] * 5)
    for _ in range(4):
        assert reason_of(lambda: guarded.open(KEY, clock.now + 0.1)) == "deadline"
    assert reason_of(lambda: guarded.open(KEY, clock.now + 0.1)) == "ok"
    for _ in range(4):
        assert reason_of(lambda: guarded.open(KEY, clock.now + 0.1)) == "deadline"
    assert guarded.up
    assert reason_of(lambda: guarded.open(KEY, clock.now + 0.1)) == "deadline"
    assert not guarded.up


def test_a_timeout_beside_a_success_counts_once() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    slow, fast = breaker.enter(), breaker.enter()
    breaker.leave(fast, "ok")
    breaker.leave(slow, "timed_out")
    assert breaker.state == "closed"
    breaker.leave(breaker.enter(), "timed_out")
    assert breaker.state == "open"


def test_half_of_the_last_twenty() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for i in range(19):
        breaker.leave(breaker.enter(), "failed" if i % 2 else "ok")
    assert breaker.state == "closed"
    breaker.leave(breaker.enter(), "failed")
    assert breaker.state == "open"


def test_answers_are_no_failures() -> None:
    answers: list[MissReason] = ["absent", "short", "evicted", "busy", "no_memory", "checksum"]
    guarded, _, clock = guard(*[(reason, 0) for reason in answers * 10], attempts=1)
    for _ in range(60):
        reason_of(lambda: guarded.open(KEY, clock.now + 1))
    assert guarded.up


def test_a_refused_write_is_an_answer() -> None:
    clock = Clock()
    guarded = Guarded(MemoryBlobs(), clock=clock, sleep=clock.sleep)
    guarded.raise_epoch(KEY.scope, 1, clock.now + 1)
    for _ in range(10):
        with pytest.raises(Rejected):
            guarded.put(KEY, memoryview(b"x"), PutHints(), clock.now + 1)
    assert guarded.up


def test_a_pin_refused_for_want_of_room_is_an_answer() -> None:
    class Full(MemoryBlobs):
        def pin(self, key: ChunkKey, until: float, owner: str) -> bool:
            raise PinQuotaExceeded("full")

        def unpin(self, key: ChunkKey) -> bool:
            return True

    guarded = Guarded(Full())
    for _ in range(50):
        with pytest.raises(PinQuotaExceeded):
            guarded.pin(KEY, 1.0, "test")
    assert guarded.up
    assert guarded.unpin(KEY)
    assert not Guarded(MemoryBlobs()).pin(KEY, 1.0, "test"), "nothing is ever evicted there"


def test_news_from_before_a_transition_is_ignored() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    early = [breaker.enter() for _ in range(7)]
    for entered in early[:5]:
        breaker.leave(entered, "failed")
    assert breaker.state == "open"
    breaker.leave(early[5], "ok")
    assert breaker.state == "open"
    clock.now += 30
    probe = breaker.enter()
    breaker.leave(early[6], "failed")
    assert breaker.state == "half_open"
    breaker.leave(probe, "ok")
    assert breaker.state == "closed"


def test_a_probe_that_never_returns_is_given_up() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.leave(breaker.enter(), "timed_out")
    clock.now += 30
    lost = breaker.enter()
    with pytest.raises(TierError):
        breaker.enter()
    clock.now += 30
    breaker.leave(breaker.enter(), "ok")
    breaker.leave(lost, "timed_out")
    assert breaker.state == "closed"


def test_one_thread_probes() -> None:
    clock = Clock()
    started, release = threading.Barrier(9), threading.Event()
    calls: list[int] = []

    class Slow(MemoryBlobs):
        def open(self, key: ChunkKey, deadline: float) -> None:
            calls.append(threading.get_ident())
            assert release.wait(10)

    guarded = Guarded(Slow(), clock=clock, sleep=clock.sleep)
    guarded.breaker.leave(guarded.breaker.enter(), "timed_out")
    clock.now += 30
    results: list[str] = []

    def work() -> None:
        started.wait(10)
        results.append(reason_of(lambda: guarded.open(KEY, clock.now + 1)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.wait(10)
    while len(results) < 7:
        threads[0].join(0.01)
    assert results == ["breaker"] * 7
    release.set()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == ["breaker"] * 7 + ["ok"]
    assert len(calls) == 1
    assert guarded.up


def test_what_a_caller_does_with_the_bytes_is_not_the_mediums_failure() -> None:
    clock = Clock()
    guarded = Guarded(MemoryBlobs(), clock=clock, sleep=clock.sleep)
    guarded.put(KEY, memoryview(b"abc"), PutHints(), clock.now + 1)
    blob = guarded.open(KEY, clock.now + 1)
    assert blob is not None
    for _ in range(10):
        with suppress(TierError), blob.read(0, 3, clock.now + 1) as data:
            assert bytes(data) == b"abc"
            raise TierError("io", "not the medium's")
    assert guarded.up


def test_a_failed_scan_counts() -> None:
    class Broken(MemoryBlobs):
        def scan(self, scope: bytes | None = None):
            raise TierError("io")
            yield

    guarded = Guarded(Broken(), clock=Clock())
    for _ in range(5):
        assert reason_of(lambda: list(guarded.scan())) == "io"
    assert reason_of(lambda: list(guarded.scan())) == "breaker"


class Machine(RuleBasedStateMachine):
    """The breaker against a model that keeps every outcome since it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(self.clock)
        self.outcomes: list[bool] = []
        self.opened_at: float | None = None
        self.running: list[Pass] = []

    @rule(seconds=st.sampled_from([0.1, 5.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.opened_at is None)
    @rule(outcome=st.sampled_from(["ok", "failed", "failed", "timed_out", "unknown"]))
    def call(self, outcome: str) -> None:
        self.breaker.leave(self.breaker.enter(), outcome)  # type: ignore[arg-type]
        if outcome == "unknown":
            return
        self.outcomes.append(outcome == "ok")
        last = self.outcomes[-20:]
        in_a_row = len(last) >= 5 and not any(last[-5:])
        half = len(last) == 20 and last.count(False) >= 10
        if outcome == "timed_out" or in_a_row or (outcome == "failed" and half):  # a success never opens it
            self.opened_at = self.clock.now
            self.outcomes = []

    @precondition(lambda self: self.opened_at is not None)
    @rule(outcome=st.sampled_from(["ok", "failed", "timed_out", "unknown"]))
    def skipped_or_probe(self, outcome: str) -> None:
        assert self.opened_at is not None
        if self.clock.now - self.opened_at < 30:
            with pytest.raises(TierError, match="breaker"):
                self.breaker.enter()
            return
        probe = self.breaker.enter()
        assert self.breaker.state == "half_open"
        with pytest.raises(TierError, match="breaker"):
            self.breaker.enter()
        self.breaker.leave(probe, outcome)  # type: ignore[arg-type]
        self.opened_at = None if outcome == "ok" else self.clock.now

    @invariant()
    def agrees(self) -> None:
        assert self.breaker.state == ("closed" if self.opened_at is None else "open")


TestBreaker = Machine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
