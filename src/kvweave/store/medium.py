"""A medium and the threads that wait for it.

No system call can be told to hurry: whoever must not wait for one lets another thread wait, and gives up at a deadline. A
medium that still owes an answer isn't asked again until it has given it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from kvweave.store.base import Blobs, TierError, contained
from kvweave.store.io_pool import IOPool

T = TypeVar("T")
_CLOSE = 5.0  # seconds, each
_FIRST = (0, 0)  # calls go before every load
_BACKGROUND = (2**40, 0)  # behind the loads of all requests


class Medium:
    """``blobs`` and their pool."""

    def __init__(self, blobs: Blobs, pool: IOPool) -> None:
        self.blobs = blobs
        self.pool = pool

    @property
    def name(self) -> str:
        return self.blobs.name

    def start(self, work: Callable[[], T]) -> Future[T]:
        """``work()`` on one of the threads, before any load."""
        return self.pool.submit(_FIRST, work)

    def later(self, work: Callable[[], None]) -> Future[None]:
        """``work()`` when no request waits for the medium."""
        return self.pool.submit(_BACKGROUND, work)

    def call(self, work: Callable[[], T], deadline: float) -> T:
        """What ``work()`` returns; raises ``TierError``, at the deadline (``time.monotonic()``) if not before.

        Not to be called on a thread of the pool.
        """
        if self.pool.stuck:
            raise TierError("breaker", "an earlier call wasn't answered in time, and still isn't")

        def contain() -> T:
            with contained(self.name):
                return work()

        future = self.start(contain)
        try:
            return future.result(timeout=max(0.0, deadline - time.monotonic()))
        except (TimeoutError, CancelledError):
            self.pool.give_up(future)
            raise TierError("deadline", "no answer") from None

    def close(self) -> None:
        """End the threads, then the medium; one that hangs doesn't keep the program from ending."""
        self.pool.close(_CLOSE)
        closing = threading.Thread(target=self.blobs.close, name=f"kvweave-{self.name}-close", daemon=True)
        closing.start()
        closing.join(_CLOSE)
