"""Threads that wait for media, so that the engine's thread doesn't have to."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Priority = tuple[int, int]
_LAST: Priority = (2**62, 0)


@dataclass(order=True)
class _Job:
    priority: Priority
    number: int
    work: Callable[[], Any] | None = field(compare=False)
    future: Future[Any] = field(compare=False)


class IOPool:
    """Runs jobs on a fixed number of threads, the lowest ``(ticket, layer)`` first. Threads start with the first job.

    Jobs must not wait for other jobs of the same pool.
    """

    def __init__(self, threads: int, name: str = "io") -> None:
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._size = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._overdue = 0

    @property
    def stuck(self) -> bool:
        """True while a job still runs that somebody has given up: its medium owes an answer."""
        return self._overdue > 0

    def give_up(self, future: Future[Any]) -> None:
        """Nobody waits for this job any more."""
        if future.cancel() or future.done():
            return
        with self._lock:
            self._overdue += 1
        future.add_done_callback(self._answered)

    def _answered(self, future: Future[Any]) -> None:
        with self._lock:
            self._overdue -= 1

    def submit(self, priority: Priority, work: Callable[[], T]) -> Future[T]:
        """Queue a job; on a closed pool its future is cancelled."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            while len(self._threads) < self._size:
                thread = threading.Thread(target=self._run, name=f"kvweave-{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.put(_Job(priority, next(self._numbers), work, future))
        return future

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if job.work is None:
                return
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                result = job.work()
            except BaseException as error:  # whoever waits for the future gets it
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            del job  # what the job holds on to must not live until the next one comes

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is queued and end the threads; after ``timeout`` seconds those that hang are left to the system."""
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._queue.put(_Job(_LAST, next(self._numbers), None, Future()))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class Staging:
    """A budget of bytes for loads on their way. It never makes anybody wait: a load without room reads later, not never."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._used

    def try_reserve(self, size: int) -> bool:
        with self._lock:
            if self._used + size > self.budget:
                return False
            self._used += size
            return True

    def force(self, size: int) -> None:
        """For the layer that is waited for right now: at most one a load, so the overshoot is bounded."""
        with self._lock:
            self._used += size

    def release(self, size: int) -> None:
        with self._lock:
            self._used -= size
