"""Erasing a tenant: first unreachable everywhere, then removed everywhere, with a receipt.

Every tenant has an epoch, which is part of his key. Raising it makes all his records unreachable at once, also those that
nobody can delete right now. Epochs are kept durably by every medium; the highest one counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from blake3 import blake3

from kvweave.core.keys import Scope
from kvweave.store.base import EraseReceipt, MissReason, TierError, TierReceipt
from kvweave.store.erasure_notes import Notes
from kvweave.store.host import HostStore
from kvweave.store.medium import Medium

LOG = logging.getLogger("kvweave.store")
EPOCH_TTL = 1.0
"""Seconds after which a process looks again whether a tenant was erased by another one."""
_LOOK = 1.0  # seconds a look at an epoch may take
_DELETE = 60.0
_RETRY = 15.0


class Eraser:
    """Epochs of tenants over all media, and erasure. Thread-safe.

    ``notes``, by tier: what couldn't be told to a tier before the program ends is noted there, and told by the next one.
    """

    def __init__(
        self, media: Sequence[Medium], host: HostStore, secret: bytes, notes: Mapping[str, Notes] | None = None
    ) -> None:
        self._media = media
        self._host = host
        self._secret = secret
        self._notes = notes or {}
        self._known: dict[bytes, tuple[int, float]] = {}
        """Scope tag -> epoch, and when it was looked up (monotonic)."""
        self._blind: dict[tuple[str, bytes], MissReason] = {}
        """(tier, scope) -> why the tier couldn't tell the epoch when it was asked last."""
        self._pending: dict[tuple[str, bytes], int] = {}
        """(tier, scope) -> epoch that couldn't be told to the tier, or whose bytes couldn't be removed."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        for medium in media:
            for tag, epoch in self._noted(medium.name).items():
                self._known[tag] = (max(epoch, self.known_epoch(tag)), float("-inf"))
                self._retry([medium.name], tag, epoch)

    def scope(self, tenant: str) -> Scope:
        """The tenant's scope at his current epoch; looks at the media again after ``EPOCH_TTL``."""
        tag = Scope.of(tenant, 0, self._secret).tag
        return Scope.of(tenant, self._epoch(tag), self._secret)

    def known_epoch(self, tag: bytes) -> int:
        """Without looking at any medium."""
        with self._lock:
            return self._known.get(tag, (0, 0.0))[0]

    def blind(self, tier: str, tag: bytes) -> MissReason | None:
        """Why a tier must not be used for a tenant: who can't tell whether he was erased may hold what was."""
        with self._lock:
            return self._blind.get((tier, tag))

    def erase(self, tag: bytes) -> EraseReceipt:
        """Epochs are milliseconds of the clock, or one more than the highest known: two who erase at about the same time, or
        one who couldn't see what the other did, still raise it twice.
        """
        epoch = max(self._look_everywhere(tag) + 1, int(time.time() * 1e3))
        with self._lock:
            self._known[tag] = (epoch, time.monotonic())
        told = {medium.name: self._tell(medium, tag, epoch) for medium in self._media}
        records, size = self._host.erase(tag)
        tiers = {self._host.name: TierReceipt(records, size, "deleted")}
        for medium in self._media:
            error = told[medium.name]
            tiers[medium.name] = self._remove(medium, tag) if error is None else TierReceipt(0, 0, "unreachable", error)
        if self._media:
            time.sleep(EPOCH_TTL)  # by then every process that shares a medium has looked again
        pending = tuple(name for name, receipt in tiers.items() if receipt.state == "unreachable")
        for name in pending:
            tiers[name] = self._note(name, tag, epoch, tiers[name])
        self._retry(pending, tag, epoch)
        now = time.time()
        name = blake3(tag + str(now).encode()).hexdigest(length=8)
        return EraseReceipt(f"erase-{name}", tag.hex(), round(now, 3), epoch, tiers, pending)

    def pending(self) -> int:
        """Removals that are still tried."""
        with self._lock:
            return len(self._pending)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_LOOK)  # a medium that hangs doesn't keep the program from ending

    def _epoch(self, tag: bytes) -> int:
        with self._lock:
            known, seen = self._known.get(tag, (0, float("-inf")))
        if not self._media or time.monotonic() - seen < EPOCH_TTL:
            return known
        latest = self._look_everywhere(tag)
        if latest > known and seen > 0:
            self._host.erase(tag)  # erased by another process
        return latest

    def _look_everywhere(self, tag: bytes) -> int:
        """Ask every medium. One that lags behind, because it couldn't be reached when the tenant was erased, is told now."""
        told = {medium.name: self._look(medium, tag) for medium in self._media}
        with self._lock:
            latest = max([self._known.get(tag, (0, 0.0))[0], *(e for e in told.values() if isinstance(e, int))])
            self._known[tag] = (latest, time.monotonic())
            for name, answer in told.items():
                self._blind.pop((name, tag), None)
                if not isinstance(answer, int):
                    self._blind[name, tag] = answer
        self._retry([name for name, answer in told.items() if isinstance(answer, int) and answer < latest], tag, latest)
        return latest

    def _look(self, medium: Medium, tag: bytes) -> int | MissReason:
        deadline = time.monotonic() + _LOOK
        try:
            return medium.call(lambda: medium.blobs.epoch(tag, deadline), deadline)
        except TierError as error:
            LOG.warning("tier %s can't tell the epoch of a tenant (%s) and isn't used for him", medium.name, error)
            return error.reason

    def _tell(self, medium: Medium, tag: bytes, epoch: int) -> str | None:
        """Raise the epoch on a tier; the error, if that failed."""
        deadline = time.monotonic() + _DELETE
        try:
            medium.call(lambda: medium.blobs.raise_epoch(tag, epoch, deadline), deadline)
        except TierError as error:
            return str(error)
        return None

    def _remove(self, medium: Medium, tag: bytes) -> TierReceipt:
        deadline = time.monotonic() + _DELETE
        try:
            records, size = medium.call(lambda: medium.blobs.erase(tag, deadline), deadline)
        except TierError as error:
            return TierReceipt(0, 0, "unreachable", str(error))
        return TierReceipt(records, size, "deleted")

    def _noted(self, name: str) -> dict[bytes, int]:
        try:
            return self._notes[name].all() if name in self._notes else {}
        except TierError as error:
            LOG.warning("erasures that tier %s wasn't told of before can't be read: %s", name, error)
            return {}

    def _note(self, name: str, tag: bytes, epoch: int, receipt: TierReceipt) -> TierReceipt:
        """For the next engine, should this one end first; the receipt says so where that can't be."""
        try:
            if name not in self._notes:
                raise TierError("io", "there is no place for notes")
            self._notes[name].add(tag, epoch)
        except TierError as error:
            return replace(receipt, error=f"{receipt.error}. Only this process knows: repeat it after a restart ({error})")
        return receipt

    def _done(self, name: str, tag: bytes, epoch: int) -> None:
        with self._lock:
            if self._pending.get((name, tag)) == epoch:  # else he was erased again meanwhile
                del self._pending[name, tag]
        try:
            if name in self._notes:
                self._notes[name].done(tag, epoch)
        except TierError as error:  # it is told once more by the next engine, which does no harm
            LOG.warning("an erasure that tier %s knows of now is still noted: %s", name, error)

    def _retry(self, names: Sequence[str], tag: bytes, epoch: int) -> None:
        with self._lock:
            self._pending.update({(name, tag): epoch for name in names})
            if self._pending and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvweave-erase", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """Until nothing is pending: tell and remove again."""
        while not self._wake.wait(_RETRY):
            with self._lock:
                pending = dict(self._pending)
            for (name, tag), epoch in pending.items():
                medium = next(m for m in self._media if m.name == name)
                if self._tell(medium, tag, epoch) is None and self._remove(medium, tag).state == "deleted":
                    self._done(name, tag, epoch)
            with self._lock:
                if not self._pending:
                    self._thread = None
                    return
