"""Writing to a disk tier's folder."""

from __future__ import annotations

import itertools
import os

from kvweave.core.keys import ChunkKey
from kvweave.store.aligned import DIRECT, is_aligned, write_all
from kvweave.store.base import PutHints, Rejected
from kvweave.store.catalog import Claim, Uncounted
from kvweave.store.disk_room import Room
from kvweave.store.disk_shared import Shared
from kvweave.store.disk_upkeep import Upkeep
from kvweave.store.files import TEMP, make_folders, sync_folder, unlink


class Writer:
    """Puts values into files: their bytes are claimed, a temporary file is written, renamed, and counted instead."""

    def __init__(self, shared: Shared, room: Room, upkeep: Upkeep, direct: bool, durable: bool) -> None:
        self._files = shared.files
        self._catalog = shared.catalog
        self._epochs = shared.epochs
        self._cleanup = shared.cleanup
        self._owner = shared.owners.name
        self._room = room
        self._upkeep = upkeep
        self._direct = direct
        self._durable = durable
        self._numbers = itertools.count()

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float, there: bool) -> bool:
        """False if ``there`` is one already that is good. Raises ``Rejected``, ``TierError`` and ``OSError``."""
        self._refuse_stale(key.scope, hints.epoch)
        if there:
            return False
        self._upkeep.wait_until_counted(deadline)
        temp = f"{os.path.dirname(key.name)}/{TEMP}{self._owner}-{next(self._numbers):x}"
        claim = Claim(temp, key.name, len(value), self._owner, hints.epoch, hints.tokens, hints.prefill_ms or None)
        try:
            self._room.reserve(claim)
        except Uncounted:  # the catalogue was lost meanwhile
            self._upkeep.reconcile()
            self._room.reserve(claim)
        try:
            self._write(claim, key.scope, value, deadline)
        except BaseException:
            self._cleanup.abandon(claim)
            raise
        return True

    def _write(self, claim: Claim, scope: bytes, value: memoryview, deadline: float) -> None:
        """Temporary file, rename, row; what fails after the rename takes the record away again."""
        temp, final = self._files.path(claim.id), self._files.record(claim.name)
        descriptor = self._create(temp, DIRECT if self._direct and is_aligned(value) else 0)
        try:
            os.fchmod(descriptor, 0o600)
            write_all(descriptor, value, deadline)
            if self._durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._refuse_stale(scope, claim.epoch)
        try:
            os.rename(temp, final)
        except FileNotFoundError:
            self._refuse_stale(scope, claim.epoch)  # the erasure takes unfinished files too
            raise
        try:
            if self._durable:
                sync_folder(os.path.dirname(final))
            self._refuse_stale(scope, claim.epoch)
            self._catalog.settle(claim)
        except BaseException:
            unlink(final)
            raise

    def _create(self, temp: str, direct: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct
        for _ in range(3):  # an erasure may take an empty folder away right after it was made
            try:
                return os.open(temp, flags, 0o600)
            except FileNotFoundError:
                make_folders(self._files.folder, os.path.dirname(temp), self._durable)
        return os.open(temp, flags, 0o600)

    def _refuse_stale(self, scope: bytes, epoch: int) -> None:
        if self._epochs.read(scope) > epoch:
            raise Rejected("stale")
