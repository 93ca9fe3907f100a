"""What all that takes care of a disk tier's folder share."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvweave.store.base import TierError
from kvweave.store.catalog import GHOSTS, Catalog
from kvweave.store.disk_cleanup import Cleanup, Damaged
from kvweave.store.disk_stats import Counts
from kvweave.store.files import Files
from kvweave.store.folder import Epochs, Owners


class Reads:
    """What reads tell eviction: which records are used, and how fast the disk is. Thread-safe."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._lock = threading.Lock()
        self._uses: dict[str, tuple[int, float]] = {}
        self.speed = 1e9
        """Bytes a second."""

    def add(self, name: str) -> None:
        with self._lock:
            count, _ = self._uses.get(name, (0, 0.0))
            self._uses[name] = (count + 1, time.time())

    def measured(self, length: int, seconds: float) -> None:
        if length >= 2**18 and seconds > 0:
            self.speed += 0.1 * (length / seconds - self.speed)

    def flush(self, catalog: Catalog) -> None:
        """Write the uses since the last time to the catalogue."""
        with self._lock:
            uses, self._uses = self._uses, {}
        if uses:
            try:
                catalog.touch(uses)
            except TierError:  # only hints for eviction are lost
                self._counts.add("errors")


class Ghosts:
    """The last ``GHOSTS`` names that were evicted, as far as this process knows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()

    def add(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._names[name] = None
            while len(self._names) > GHOSTS:
                self._names.popitem(last=False)

    def forget(self, name: str) -> None:
        with self._lock:
            self._names.pop(name, None)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._names


@dataclass(frozen=True)
class Shared:
    """A folder that can be written, and what is known of it."""

    files: Files
    epochs: Epochs
    owners: Owners
    catalog: Catalog
    cleanup: Cleanup
    damaged: Damaged
    reads: Reads
    ghosts: Ghosts
    counts: Counts

    @classmethod
    def of(cls, files: Files, epochs: Epochs, owners: Owners, reads: Reads, counts: Counts, patience: float) -> Shared:
        """``patience`` [s]: for the catalogue, when another process is at it."""
        catalog = Catalog(files, patience)
        cleanup = Cleanup(files, catalog, epochs, owners, counts)
        damaged = Damaged(files, catalog, cleanup, counts)
        return cls(files, epochs, owners, catalog, cleanup, damaged, reads, Ghosts(), counts)
