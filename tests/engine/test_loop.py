"""The engine on its own thread: many callers, cancellations, shutting down."""

from __future__ import annotations

import gc
import queue
import random
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvweave.core.report import Delta
from kvweave.core.sampling import SamplingParams
from kvweave.engine.loop import EngineLoop
from kvweave.engine.sequence import Request
from kvweave.errors import Draining, Overloaded, PromptExceedsPool, RequestAborted
from kvweave.reuse.registry import make_technique
from tests.lab import BOS, Lab, doc, prompt_of

WAIT = 60  # seconds after which a test has failed


def request(number: int = 0, max_tokens: int = 8, **fields: object) -> Request:
    made = make_technique("prefix")
    prompt = prompt_of([BOS, 3 + number], doc(20, number))
    return replace(Request(prompt, SamplingParams(max_tokens=max_tokens), made, made.reuse), **fields)  # type: ignore[arg-type]


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    made = EngineLoop(Lab().engine)
    yield made
    made.close()


def answer(pieces: queue.SimpleQueue[Delta | Exception]) -> list[Delta]:
    deltas: list[Delta] = []
    while True:
        piece = pieces.get(timeout=WAIT)
        if isinstance(piece, Exception):
            raise piece
        deltas.append(piece)
        if piece.output is not None:
            return deltas


def test_answers_of_many_threads_are_those_of_one(loop: EngineLoop) -> None:
    expected = [loop.run([request(i, 12)])[0].output for i in range(6)]
    found: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        (sequence,) = loop.run([request(number % 6, 12)])
        assert sequence.output is not None
        found[number] = sequence.output.token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert found == {n: expected[n % 6].token_ids for n in range(24)}  # type: ignore[union-attr]
    loop.call(lambda engine: engine.check_integrity())


def test_a_listener_hears_every_piece_in_order(loop: EngineLoop) -> None:
    pieces: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
    loop.submit(request(1, 9), pieces.put)
    deltas = answer(pieces)
    assert deltas[-1].output is not None
    assert tuple(d.token_id for d in deltas) == deltas[-1].output.token_ids


def test_cancelling_frees_the_slots_and_silences_the_listener(loop: EngineLoop) -> None:
    free = loop.engine.allocator.num_free
    pieces: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
    sequence = loop.submit(request(1, 400), pieces.put)
    pieces.get(timeout=WAIT)
    loop.cancel(sequence)
    loop.call(lambda engine: engine.tree.clear())
    assert loop.call(lambda engine: engine.allocator.num_free) == free
    heard = pieces.qsize()
    loop.run([request(2)])
    assert pieces.qsize() == heard
    loop.cancel(sequence)  # again: nothing happens


def test_what_can_never_run_is_refused_on_the_callers_thread(loop: EngineLoop) -> None:
    with pytest.raises(PromptExceedsPool):
        EngineLoop(Lab(slots=16).engine).submit(request(), lambda piece: None)
    assert loop.run([request()])[0].output is not None


def test_a_full_queue_is_told_at_once() -> None:
    lab = Lab(max_sequences=1)
    loop = EngineLoop(lab.engine, max_queue=2)
    held = threading.Event()
    running = loop.submit(request(0, 400), lambda piece: held.wait(WAIT))  # the engine stands still at its first piece
    while not lab.engine.scheduler.running:
        pass
    for i in (1, 2):
        loop.submit(request(i), lambda piece: None)
    with pytest.raises(Overloaded, match="limit 2") as refused:
        loop.submit(request(3), lambda piece: None)
    assert refused.value.retry_after is not None
    held.set()
    loop.cancel(running)
    assert loop.drain(WAIT)
    loop.close()


def test_draining_answers_what_runs_and_takes_nothing_new(loop: EngineLoop) -> None:
    pieces: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
    loop.submit(request(1, 30), pieces.put)
    assert loop.drain(WAIT)
    assert answer(pieces)[-1].output is not None
    with pytest.raises(Draining):
        loop.submit(request(2), pieces.put)


def test_closing_tells_those_who_wait() -> None:
    loop = EngineLoop(Lab().engine)
    pieces: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
    loop.submit(request(1, 450), pieces.put)
    pieces.get(timeout=WAIT)
    loop.close()
    with pytest.raises(RequestAborted, match="closed"):
        answer(pieces)
    loop.close()
    assert not loop.alive


def test_an_error_of_work_between_steps_is_its_callers(loop: EngineLoop) -> None:
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 // 0)
    assert loop.call(lambda engine: loop.call(lambda same: same is engine)), "called from the engine's own thread"
    assert loop.alive


def test_a_listener_that_fails_stops_nobody(loop: EngineLoop) -> None:
    def fails(piece: Delta | Exception) -> None:
        raise ValueError("a bug")

    loop.submit(request(1), fails)
    assert loop.run([request(2)])[0].output is not None
    assert loop.drain(WAIT)


def test_a_loop_nobody_has_is_collected_and_its_thread_ends() -> None:
    loop = EngineLoop(Lab().engine)
    loop.run([request()])
    thread, gone = loop._thread, weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    thread.join(WAIT)
    assert not thread.is_alive()


def test_five_hundred_requests_with_cancellations_leave_nothing_behind() -> None:
    chooser = random.Random(1)
    lab = Lab(slots=600, max_sequences=8)
    loop = EngineLoop(lab.engine)
    ended = threading.Semaphore(0)

    def listen(piece: Delta | Exception) -> None:
        if isinstance(piece, Exception) or piece.output is not None:
            ended.release()

    cancelled = 0
    for i in range(500):
        sequence = loop.submit(request(i % 7, chooser.choice([0, 1, 4, 30])), listen)
        if chooser.random() < 0.3:
            loop.cancel(sequence)
            cancelled += 1
    assert loop.drain(WAIT)
    assert not lab.engine.scheduler.running
    loop.call(lambda engine: engine.check_integrity())
    loop.call(lambda engine: engine.tree.clear())
    assert loop.call(lambda engine: engine.allocator.num_free) == 600
    assert cancelled > 100
    loop.close()


def test_a_step_that_always_fails_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    loop = EngineLoop(lab.engine)

    def broken() -> None:
        raise ValueError("a bug in the scheduler")

    with monkeypatch.context() as patch:
        patch.setattr(lab.engine, "step", broken)
        with pytest.raises(RequestAborted, match="a bug in the scheduler"):
            loop.run([request(1)])
    assert loop.run([request(1)])[0].output is not None, "the loop goes on"
    loop.call(lambda engine: engine.check_integrity())
    loop.close()
