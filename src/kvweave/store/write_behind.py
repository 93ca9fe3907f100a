"""Writes to slow tiers, behind the request that made the record.

The queue is bounded in bytes, first come first served. Full, it never makes a request wait: the record is dropped, counted
and logged. Who can wait (a precompute job) says so and gets room. Behind a write that has overrun its time nobody waits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvweave.core.keys import ChunkKey
from kvweave.store.base import ChunkRecord

LOG = logging.getLogger("kvweave.store")
_LOOK = 0.5  # seconds between two looks at whether writes stall
_CANCEL = 5.0  # seconds to wait for a write that can't be called back; the medium refuses it if its tenant was erased


class _Entry(NamedTuple):
    record: ChunkRecord
    epoch: int


class _Write(NamedTuple):
    record: ChunkRecord
    due: float
    """Time (monotonic) by which it should be over."""


class WriteBehind:
    """Threads that hand records to ``write``, which should take ``patience`` [s] at most. A record is referred to until it
    has returned.

    ``write`` gets the record and the tenant's epoch at the time it was offered. Two threads: while one waits for the medium,
    the other makes bytes.
    """

    def __init__(
        self, write: Callable[[ChunkRecord, int], None], max_bytes: int, threads: int = 2, patience: float = 60.0
    ) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._patience = patience
        self._size = threads
        self._entries: dict[ChunkKey, _Entry] = {}
        self._writing: dict[ChunkKey, _Write] = {}
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self.dropped: Counter[str] = Counter()
        """Records that were never written, by reason: full, stalled, deleted, closed, error."""

    @property
    def queued(self) -> tuple[int, int]:
        """Records and bytes that wait or are being written."""
        with self._changed:
            busy = self._writing.values()
            return len(self._entries) + len(busy), self._bytes + sum(write.record.num_bytes for write in busy)

    def offer(self, record: ChunkRecord, epoch: int, *, wait: bool = False) -> bool:
        """Queue a record; False if it was dropped. With ``wait`` it waits for room instead."""
        size = record.num_bytes
        with self._changed:
            if record.key in self._entries or record.key in self._writing:
                return True
            if wait:
                self._wait_for(lambda: self._closed or self._fits(size))
            why = "closed" if self._closed else "stalled" if self._stalled() else "" if self._fits(size) else "full"
            if why:
                self._drop(record, why)
                return False
            self._entries[record.key] = _Entry(record, epoch)
            self._bytes += size
            self._start()
            self._changed.notify_all()
            return True

    def wait_for_room(self) -> None:
        """Until the queue is at most half full: for those who make records faster than they can be written."""
        with self._changed:
            self._wait_for(lambda: self._closed or 2 * self._bytes <= self._max_bytes)

    def cancel(self, wanted: Callable[[ChunkKey], bool]) -> int:
        """Forget queued writes, and wait (a few seconds) for those being written; returns how many were forgotten."""
        with self._changed:
            gone = [key for key in self._entries if wanted(key)]
            for key in gone:
                self._bytes -= self._entries.pop(key).record.num_bytes
            self.dropped["deleted"] += len(gone)
            self._changed.wait_for(lambda: not any(wanted(key) for key in self._writing), _CANCEL)
            self._changed.notify_all()
            return len(gone)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything offered so far is written; False if ``timeout`` (seconds) passed first, or it stalls."""
        with self._changed:
            return self._wait_for(lambda: not self._entries and not self._writing, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Write what is queued, then stop. False if ``timeout`` passed: the rest is dropped, counted and logged."""
        done = self.flush(timeout)
        with self._changed:
            self._closed = True
            for record in [
                *(entry.record for entry in self._entries.values()),
                *(write.record for write in self._writing.values()),
            ]:
                self._drop(record, "closed")
            self._entries.clear()
            self._bytes = 0
            self._changed.notify_all()
        for thread in self._threads if done else ():
            thread.join()
        return done

    def _wait_for(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until ``true()``; False if ``timeout`` passed first, or while a write has overrun its time."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not true():
            left = end - time.monotonic()
            if left <= 0 or self._stalled():
                return False
            self._changed.wait(min(left, _LOOK))
        return True

    def _stalled(self) -> bool:
        now = time.monotonic()
        return any(write.due < now for write in self._writing.values())

    def _fits(self, size: int) -> bool:
        return self._bytes + size <= self._max_bytes or not (self._entries or self._writing)

    def _drop(self, record: ChunkRecord, why: str) -> None:
        self.dropped[why] += 1
        LOG.warning("a record of %d tokens was not written to the slower tiers: %s", len(record.identity.token_ids), why)

    def _start(self) -> None:
        if len(self._threads) < min(self._size, len(self._entries) + len(self._writing)):
            thread = threading.Thread(target=self._run, name=f"kvweave-write-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._entries)
                if not self._entries:
                    return
                key = next(iter(self._entries))
                entry = self._entries.pop(key)
                self._bytes -= entry.record.num_bytes
                self._writing[key] = _Write(entry.record, time.monotonic() + self._patience)
            start = time.perf_counter()
            try:
                self._write(entry.record, entry.epoch)
            except Exception:  # a bug in a tier must not end the thread that all others write through
                LOG.exception("a write failed after %.1f s", time.perf_counter() - start)
                with self._changed:
                    self.dropped["error"] += 1
            finally:
                with self._changed:
                    del self._writing[key]
                    self._changed.notify_all()
                del entry
