"""The engine's own thread: all others hand requests over here, and get pieces of answers back."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvweave.core.report import Delta
from kvweave.engine.engine import Engine
from kvweave.engine.sequence import Request
from kvweave.engine.sequence import Sequence as Running
from kvweave.errors import Draining, Overloaded, RequestAborted

LOG = logging.getLogger("kvweave.engine")
Listener = Callable[[Delta | Exception], None]
Pieces = queue.SimpleQueue[Delta | Exception]
T = TypeVar("T")

_POLL = 1.0  # seconds: a lookup's time may be over although nothing happened
_EXIT = 10.0  # seconds the last step may take at the end of the program
_BUSY = 2.0  # seconds after which it makes sense to send a request again


class EngineLoop:
    """Steps an engine while there is something to do. All methods may be called from any thread.

    ``max_queue``: most requests that wait to be started; None: no limit.
    """

    def __init__(self, engine: Engine, max_queue: int | None = None) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self._commands: deque[Callable[[], None]] = deque()
        self._listeners: dict[Running, Listener] = {}
        self._arriving = 0
        self._draining = False
        self._closed = False
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), engine.activity), name="kvweave-engine", daemon=True
        )
        self._thread.start()
        # A daemon thread in the middle of a forward pass would take the interpreter down at exit.
        self._at_exit = weakref.finalize(self, _stop, self._commands, engine.activity, self._thread)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def running(self) -> int:
        return len(self.engine.scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self.engine.scheduler.waiting) + self._arriving

    def submit(self, request: Request, listener: Listener) -> Running:
        """Queue a request. ``listener`` gets every ``Delta`` of all its samples in order, or once an exception.

        It runs on the engine's thread and must not block. Raises ``ContextLengthExceeded``, ``PromptExceedsPool``,
        ``Overloaded`` and ``Draining`` before anything is queued.
        """
        (running,) = self.submit_all([request], [listener])
        return running

    def submit_all(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> list[Running]:
        """Queue requests together, so that they may share their first step; all of them or none."""
        sequences = [self.engine.prepare(request) for request in requests]
        with self._lock:
            if self._draining or self._closed:
                raise Draining("The server is shutting down. Send the request to another one.", retry_after=_BUSY)
            if self.max_queue is not None and self.waiting + len(sequences) > self.max_queue:
                raise Overloaded(
                    f"{self.waiting} requests are queued, limit {self.max_queue}. "
                    f"Retry after {_BUSY:g} s, or raise --max-queue.",
                    retry_after=_BUSY,
                )
            self._arriving += len(sequences)

        def add() -> None:
            self._arriving -= len(sequences)
            for sequence, listener in zip(sequences, listeners, strict=True):
                self._listeners[sequence] = listener
                self.engine.enqueue(sequence)

        self._command(add)
        return sequences

    def cancel(self, sequence: Running, why: str = "it was cancelled") -> None:
        """Stop a request and free its slots before the next step; its listener hears nothing more."""

        def abort() -> None:
            if self._listeners.pop(sequence, None) is not None:
                self.engine.abort(sequence, why)

        self._command(abort)

    def call(self, work: Callable[[Engine], T]) -> T:
        """What ``work`` returns, run on the engine's thread between two steps."""
        if threading.current_thread() is self._thread:
            return work(self.engine)
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(work(self.engine))
            except BaseException as error:  # whoever waits gets it
                answer.set_exception(error)

        self._command(run)
        while True:
            try:
                return answer.result(timeout=_POLL)
            except TimeoutError:
                if not answer.done() and not self.alive:
                    raise RequestAborted("The engine's thread has ended. Make a new LLM.") from None

    def run(self, requests: Sequence[Request]) -> list[Running]:
        """Run requests together and wait until all have their output; one that fails, or an interrupt, stops all of them."""
        queues: list[Pieces] = [queue.SimpleQueue() for _ in requests]
        sequences = self.submit_all(requests, [q.put for q in queues])
        try:
            for sequence, pieces in zip(sequences, queues, strict=True):
                for _ in self._deltas(sequence, pieces):
                    pass
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence)
            raise
        return sequences

    def stream(self, request: Request) -> Iterator[Delta]:
        """Pieces of one request, which is queued when the first one is fetched; closing the iterator cancels it."""
        pieces: Pieces = queue.SimpleQueue()
        sequence = self.submit(request, pieces.put)
        try:
            yield from self._deltas(sequence, pieces)
        finally:
            self.cancel(sequence)  # nothing happens if it is finished

    def _deltas(self, sequence: Running, pieces: Pieces) -> Iterator[Delta]:
        left = sequence.request.samples
        while left:
            piece = self._next(pieces)
            if isinstance(piece, Exception):
                raise piece
            left -= piece.output is not None
            yield piece

    def _next(self, pieces: Pieces) -> Delta | Exception:
        while True:
            try:
                return pieces.get(timeout=_POLL)
            except queue.Empty:
                if not self.alive:
                    return RequestAborted("The engine's thread has ended. Make a new LLM.")

    def drain(self, timeout: float) -> bool:
        """Take nothing new, and wait until all is answered; False if ``timeout`` (seconds) passed first."""
        with self._lock:
            self._draining = True
        with self._idle:
            return self._idle.wait_for(lambda: not self._listeners and not self._arriving, timeout)

    def close(self) -> None:
        """Stop what runs, close the engine and end the thread. Calling it again is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.alive:
            self.call(lambda engine: self._close_engine())
        self._at_exit()

    def _close_engine(self) -> None:
        self.engine.close()
        self._deliver()

    def _command(self, work: Callable[[], None]) -> None:
        self._commands.append(work)
        self.engine.activity.set()

    def _turn(self) -> bool:
        """What others asked for, then one step; False if there was nothing to do."""
        while self._commands:
            self._commands.popleft()()
        if not self._listeners:
            self._report_idle()
            return False
        try:
            return bool(self.engine.step())
        except Exception as error:
            LOG.debug("a step of the engine failed", exc_info=True)
            self._blame(error)
            return True
        finally:
            self._deliver()

    def _blame(self, error: Exception) -> None:
        """A batch that failed has been aborted, and its requests hear of it. Where nobody was, all of them are: a step that
        fails again and again would keep everybody waiting for ever."""
        if not any(sequence.failure is not None for sequence in self._listeners):
            for sequence in self._listeners:
                self.engine.abort(sequence, f"the engine failed ({type(error).__name__}: {error})")

    def _deliver(self) -> None:
        """Hand out what the last step produced."""
        for sequence, listener in list(self._listeners.items()):
            while sequence.deltas:
                self._tell(listener, sequence.deltas.popleft())
            if sequence.failure is not None:
                self._tell(listener, sequence.failure)
            if sequence.finished or sequence.failure is not None:
                del self._listeners[sequence]

    def _tell(self, listener: Listener, piece: Delta | Exception) -> None:
        try:
            listener(piece)
        except Exception:  # who can't listen must not stop the others
            LOG.exception("a listener failed")

    def _report_idle(self) -> None:
        with self._idle:
            self._idle.notify_all()


class _Stop(Exception):
    """Ends the thread."""


def _run(loop: weakref.ref[EngineLoop], activity: threading.Event) -> None:
    """The thread. It doesn't keep the loop alive: an LLM that nobody has any more is collected, and the thread ends."""
    while True:
        activity.clear()
        this = loop()
        if this is None:
            return
        try:
            busy = this._turn()
            waits = bool(this._listeners)
        except _Stop:
            return
        del this
        if not busy:
            activity.wait(_POLL if waits else None)


def _stop(commands: deque[Callable[[], None]], activity: threading.Event, thread: threading.Thread) -> None:
    def stop() -> None:
        raise _Stop

    commands.append(stop)
    activity.set()
    if threading.current_thread() is not thread:
        thread.join(_EXIT)
