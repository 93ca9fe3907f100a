"""Files that must go, and a catalogue that must hear of it: now, or later where that fails now."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable

from kvweave.store.base import TierError
from kvweave.store.catalog import Catalog, Claim
from kvweave.store.disk_stats import Counts
from kvweave.store.files import DAMAGED, TEMP, Files, is_hex, scope_of, unlink
from kvweave.store.folder import Epochs, Owners

KEPT_DAMAGED = 16


class Cleanup:
    """Takes away what writes that ended early left behind, and keeps in mind what couldn't be done at once."""

    def __init__(self, files: Files, catalog: Catalog, epochs: Epochs, owners: Owners, counts: Counts) -> None:
        self._files = files
        self._catalog = catalog
        self._epochs = epochs
        self._owners = owners
        self._counts = counts
        self._lock = threading.Lock()
        self._unfinished: list[Claim] = []
        self._unsynced: set[str] = set()

    @property
    def pending(self) -> int:
        """Things to try again."""
        return len(self._unfinished) + len(self._unsynced)

    def abandon(self, claim: Claim) -> None:
        """Give up on a write of this process: no file, no claim."""
        try:
            self._finish(claim)
        except (TierError, OSError):
            self._counts.add("errors")
            with self._lock:
                self._unfinished.append(claim)

    def removed(self, names: Iterable[str]) -> None:
        """Files of these records were removed: tell the catalogue."""
        names = list(names)
        try:
            self._catalog.sync(names)
        except TierError:
            self._counts.add("errors")
            with self._lock:
                self._unsynced.update(names)

    def retry(self) -> None:
        """Once more what failed."""
        with self._lock:
            unfinished, self._unfinished = self._unfinished, []
            unsynced, self._unsynced = self._unsynced, set()
        for claim in unfinished:
            self.abandon(claim)
        if unsynced:
            self.removed(unsynced)

    def settle_dead(self) -> bool:
        """Finish the writes of dead processes; True if there were any. Raises ``TierError`` and ``OSError``."""
        dead = [claim for claim in self._catalog.claims() if claim.owner and not self._owners.alive(claim.owner)]
        for claim in dead:
            self._finish(claim)
        return bool(dead)

    def remove_dead(self, temps: Iterable[str]) -> None:
        """Remove the files of dead processes: of these temporary ones, and their locks. Raises ``OSError``."""
        for path in temps:
            owner = os.path.basename(path).removeprefix(TEMP).rpartition("-")[0]
            if not self._owners.alive(owner):
                unlink(path)
        self._owners.remove_dead()

    def _finish(self, claim: Claim) -> None:
        """Remove what a write that ended early left behind. The record counts if it is there and not of an erased tenant."""
        unlink(self._files.path(claim.id))
        if self._epochs.read(scope_of(claim.name)) > claim.epoch:
            unlink(self._files.record(claim.name))
        self._catalog.settle(claim)


class Damaged:
    """Values that failed their checks: the last ``KEPT_DAMAGED`` are kept, and counted, so that they can be looked at."""

    def __init__(self, files: Files, catalog: Catalog, cleanup: Cleanup, counts: Counts) -> None:
        self._files = files
        self._catalog = catalog
        self._cleanup = cleanup
        self._counts = counts

    def take(self, name: str) -> None:
        """Move a record here. Raises ``OSError`` if it is still in its place."""
        place = f"{DAMAGED}/{name.replace('/', '-')}-{time.time_ns():x}.bad"
        try:
            os.rename(self._files.record(name), self._files.path(place))
        except FileNotFoundError:
            self._cleanup.removed([name])
            return
        try:
            self._catalog.moved(name, place)
            self.drop(keep=KEPT_DAMAGED)
        except (TierError, OSError):  # what can't be counted isn't kept
            self._counts.add("errors")
            self._cleanup.removed([name])
            with contextlib.suppress(TierError, OSError):  # counted by the next start, if it is still there then
                self._unlink([place])

    def drop(self, keep: int) -> bool:
        """Unlink all but the youngest ``keep``; True if there were more. Raises ``TierError`` and ``OSError``."""
        places = sorted(self._places(), key=lambda place: place.rsplit("-", 1)[-1].rjust(24, "0"))
        old = places[: max(0, len(places) - keep)]
        self._unlink(old)
        return bool(old)

    def erase(self, tag: str) -> None:
        """Unlink those of one scope. Raises ``TierError`` and ``OSError``."""
        self._unlink([place for place in self._places() if f"-{tag}-" in place])

    def count(self) -> None:
        """Make the catalogue agree with the files. Raises ``TierError`` and ``OSError``."""
        counted = {claim.id for claim in self._catalog.claims() if not claim.owner}
        found = set(self._places())
        self._catalog.unclaim(counted - found)
        for place in found - counted:
            parts = os.path.basename(place).split("-")
            if len(parts) == 5 and all(map(is_hex, parts[:4])):
                self._catalog.moved("/".join(parts[:4]), place)

    def _places(self) -> list[str]:
        return [f"{DAMAGED}/{file}" for file in os.listdir(self._files.path(DAMAGED))]

    def _unlink(self, places: Iterable[str]) -> None:
        gone = []
        try:
            for place in places:
                unlink(self._files.path(place))
                gone.append(place)
        finally:
            self._catalog.unclaim(gone)
