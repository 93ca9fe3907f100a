"""Keeping a folder's catalogue in step with its files."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time

from kvweave.store.base import TierError
from kvweave.store.disk_shared import Shared
from kvweave.store.record import FIRST_READ, decode_header, header_length

FLUSH_SECONDS = 2.0
"""Uses are written to the catalogue this often."""
COUNT_SECONDS = 30.0
"""What the first write waits at most for the files to be counted."""


LOG = logging.getLogger("kvweave.store")


class Upkeep:
    """A thread that counts the files, then writes uses to the catalogue and tries again what failed.

    ``capacity`` is told to those who open the folder without one. ``learn``: find out what records took to compute.
    """

    def __init__(self, shared: Shared, capacity: int | None, learn: bool, name: str) -> None:
        self._files = shared.files
        self._catalog = shared.catalog
        self._cleanup = shared.cleanup
        self._damaged = shared.damaged
        self._reads = shared.reads
        self._ghosts = shared.ghosts
        self._counts = shared.counts
        self._capacity = capacity
        self._learn = learn
        self._unlearned = learn
        self.reconciled = threading.Event()
        """Set when every file counts against the capacity."""
        self.tried = threading.Event()
        """Set when that was tried once."""
        self.seconds = 0.0
        """What the last comparison of catalogue and files took."""
        self._closed = threading.Event()
        self._reconciling = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name=f"kvweave-{name}-keeper", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._reads.flush(self._catalog)

    def wait_until_counted(self, deadline: float) -> None:
        """Before a write. Raises ``TierError``."""
        if self.closed:
            raise TierError("io", "the store is closed")
        if not self.tried.wait(max(0.0, min(COUNT_SECONDS, deadline - time.monotonic()))):
            raise TierError("busy", "the files are still being counted")
        if not self.reconciled.is_set():
            self.reconcile()

    def reconcile(self) -> None:
        """Make the catalogue agree with the files, and settle what dead processes left. Raises ``TierError``."""
        with self._reconciling:
            if self.reconciled.is_set() and self._catalog.get("counted"):
                return  # another thread was faster
            start = time.monotonic()
            try:
                temps = self._compare()
                self._cleanup.settle_dead()
                self._cleanup.remove_dead(temps)
                self._damaged.count()
            except OSError as error:
                raise TierError("io", str(error)) from error
            if self._capacity is not None:
                self._catalog.set("capacity", self._capacity)
            self._catalog.counted()
            self._ghosts.add(self._catalog.evicted())
            self._unlearned = self._learn
            self.seconds = time.monotonic() - start
            self.reconciled.set()

    def _compare(self) -> list[str]:
        """Correct the rows that differ from their files; returns the paths of temporary files."""
        known = self._catalog.sizes()
        differing: list[str] = []
        temps: list[str] = []
        for name, entry in self._files.walk():
            if name is None:
                temps.append(entry.path)
                continue
            with contextlib.suppress(FileNotFoundError):
                if known.pop(name, -1) != entry.stat(follow_symlinks=False).st_size:
                    differing.append(name)
        self._catalog.sync([*differing, *known])  # known, still: rows whose files weren't seen
        return temps

    def _keep(self) -> None:
        while True:
            try:
                if not self.reconciled.is_set():
                    self.reconcile()
                self._cleanup.retry()
                self._reads.flush(self._catalog)
                if self._unlearned:
                    self._learn_costs()
            except (TierError, OSError):  # counted, and tried again in a moment; a put that needs it will raise
                self._counts.add("errors")
            except Exception:  # whatever else: without this thread nothing would ever be counted again
                LOG.exception("upkeep of the disk tier failed")
                self._counts.add("errors")
            self.tried.set()
            if self._closed.wait(FLUSH_SECONDS):
                return

    def _learn_costs(self) -> None:
        """Read what adopted records took to compute from their headers, a few at a time."""
        found: list[tuple[float | None, int, str]] = []
        self._unlearned = False  # until files are adopted again: looking for such records reads the whole catalogue
        for name in self._catalog.without_prefill(64):
            try:
                with open(self._files.record(name), "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    first = file.read(FIRST_READ)
                    first += file.read(max(0, header_length(memoryview(first), size) - len(first)))
                header = decode_header(memoryview(first), size)
                found.append((header.prefill_ms or None, header.num_tokens, name))
            except (OSError, TierError):  # gone, or not a record: whoever opens it will find out
                found.append((None, 0, name))
        if found:
            self._catalog.set_prefill(found)
            self._unlearned = True
