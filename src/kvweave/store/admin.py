"""Operations on a store folder without a model: list, inspect, verify, pin, remove, erase.

All of them work while engines use the folder: records are immutable files, and what changes goes through the disk tier's
own locks. Looking at a record is not a use of it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from kvweave.core.keys import ChunkKey
from kvweave.errors import StoreError
from kvweave.store.base import DAMAGED, BlobInfo, EraseReceipt, TierError
from kvweave.store.catalog_db import CatalogFull
from kvweave.store.checking import Damage, check_file
from kvweave.store.disk import COUNT_SECONDS, DiskBlobs
from kvweave.store.erasure import Eraser
from kvweave.store.files import SUFFIX
from kvweave.store.host import HostStore
from kvweave.store.io_pool import IOPool
from kvweave.store.medium import Medium
from kvweave.store.record import Header
from kvweave.store.selection import Selection, require_store

SORTS: dict[str, Callable[[BlobInfo], float]] = {
    "used": lambda info: -info.last_used,
    "created": lambda info: -info.created,
    "size": lambda info: -info.size,
    "hits": lambda info: -info.hits,
}
"""Youngest, largest, most used first."""
_BATCH = 256
_DELETE_SECONDS = 60.0
_TEMP = ".tmp-"

Step = Callable[[str], None]
"""Told of each record that was dealt with."""


@dataclass(frozen=True)
class Checked:
    """A record and its header; ``damage`` instead if that is wrong."""

    info: BlobInfo
    header: Header | None = None
    damage: Damage | None = None


@dataclass(frozen=True)
class Verified:
    """``gone``: records that were evicted or removed meanwhile. ``repaired``: damaged ones taken away."""

    checked: int
    bytes: int
    gone: int
    damaged: tuple[Damage, ...]
    repaired: int
    seconds: float


@dataclass
class Share:
    """What one tenant or one model has in the store."""

    records: int = 0
    bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class FolderStats:
    """What lies in a store folder. ``counted_bytes`` has what is being written and damaged files too."""

    records: int
    bytes: int
    tokens: int
    counted_bytes: int
    capacity: int | None
    """Of the engine that used the folder last; None if none did."""
    free: int
    pinned_records: int
    pinned_bytes: int
    unreadable: int
    """Records whose header is damaged: see ``verify``."""
    read_only: bool
    rebuilds: int
    rebuild_seconds: float
    temporary_files: int
    damaged_files: int
    processes: int
    """That use the folder now, this one not counted."""
    scopes: dict[str, Share] = field(default_factory=dict)
    models: dict[str, Share] = field(default_factory=dict)


class StoreFolder:
    """A store folder, open for administration; a context manager. Raises ``InvalidOption`` if it isn't a store.

    Methods raise ``StoreError`` where the folder fails, is locked for too long or is read-only.
    """

    def __init__(self, root: Path, *, create: bool = False) -> None:
        if not create:
            require_store(root)
        self.root = root.absolute()
        self.blobs = DiskBlobs(self.root, capacity=None)

    def __enter__(self) -> StoreFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self.explained():
            self.blobs.close()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Failures of the medium as errors that say what to do."""
        try:
            yield
        except CatalogFull as error:
            raise StoreError(f"The file system of {self.root} has no room even for the catalogue. Free some.") from error
        except TierError as error:
            hint = "Try again in a moment." if error.reason == "busy" else "Check the disk and the permissions."
            raise StoreError(f"The store {self.root} can't do that ({error}). {hint}") from error

    def path(self, key: ChunkKey) -> str:
        return os.path.join(self.root, "v1", f"{key.name}{SUFFIX}")

    # Looking

    def select(self, selection: Selection, sort: str = "used") -> list[BlobInfo]:
        """The records meant, in the order of ``SORTS``."""
        with self.explained():
            return sorted(selection.choose(self.blobs.scan(selection.tag)), key=SORTS[sort])

    def check(self, info: BlobInfo, *, full: bool = False) -> Checked | None:
        """A record with its header, or with its damage; None if it is gone."""
        try:
            return Checked(info, check_file(self.path(info.key), info.key, full=full))
        except FileNotFoundError:
            return None
        except TierError as error:
            return Checked(info, damage=Damage(info.key, error.reason, str(error)))

    def stats(self, step: Step = lambda line: None) -> FolderStats:
        """Reads every header."""
        self.blobs.reconciled.wait(COUNT_SECONDS)
        scopes: dict[str, Share] = {}
        models: dict[str, Share] = {}
        unreadable, infos, now = 0, self.select(Selection()), time.time()
        for info in infos:
            checked = self.check(info)
            unreadable += checked is not None and checked.header is None
            tokens = checked.header.num_tokens if checked is not None and checked.header is not None else 0
            for shares, name in ((scopes, info.key.scope.hex()), (models, info.key.model.hex())):
                share = shares.setdefault(name, Share())
                share.records += 1
                share.bytes += info.size
                share.tokens += tokens
            step(info.key.name)
        with self.explained():
            disk, capacity = self.blobs.stats(), self.blobs.capacity
        temporary, damaged, owners = _other_files(self.root / "v1")
        pinned = [info for info in infos if info.pinned_until > now]
        return FolderStats(
            records=len(infos),
            bytes=sum(info.size for info in infos),
            tokens=sum(share.tokens for share in models.values()),
            counted_bytes=disk.bytes,
            capacity=capacity,
            free=disk.free,
            pinned_records=len(pinned),
            pinned_bytes=sum(info.size for info in pinned),
            unreadable=unreadable,
            read_only=self.blobs.read_only,
            rebuilds=disk.rebuilds,
            rebuild_seconds=disk.rebuild_seconds,
            temporary_files=temporary,
            damaged_files=damaged,
            processes=max(0, owners - (not self.blobs.read_only)),
            scopes=scopes,
            models=models,
        )

    def verify(
        self, infos: Sequence[BlobInfo], *, full: bool, repair: bool = False, step: Step = lambda line: None
    ) -> Verified:
        """Check headers, or all bytes. ``repair`` takes away what is damaged for good, so that it is computed anew."""
        start = time.monotonic()
        damaged: list[Damage] = []
        done: Counter[str] = Counter()
        for info in infos:
            checked = self.check(info, full=full)
            step(info.key.name)
            if checked is None:
                done["gone"] += 1
                continue
            done["checked"] += 1
            if checked.header is not None:
                done["bytes"] += checked.header.total if full else 0
                continue
            assert checked.damage is not None
            damaged.append(checked.damage)
            done["repaired"] += repair and self._take_away(info, full)
        return Verified(
            done["checked"], done["bytes"], done["gone"], tuple(damaged), done["repaired"], time.monotonic() - start
        )

    def _take_away(self, info: BlobInfo, full: bool) -> bool:
        """Look again first: an engine may have replaced it meanwhile."""
        again = self.check(info, full=full)
        if again is None or again.damage is None or again.damage.reason not in DAMAGED:
            return False
        with self.explained():
            self.blobs.discard(info.key, again.damage.reason)
        return not self.blobs.read_only

    # Changing

    def pin(self, infos: Sequence[BlobInfo], seconds: float, owner: str) -> int:
        """Keep records from eviction for so long; returns how many were still there."""
        until = time.time() + seconds
        with self.explained():
            return sum(self.blobs.pin(info.key, until, owner) for info in infos)

    def unpin(self, infos: Sequence[BlobInfo]) -> int:
        """How many were pinned."""
        with self.explained():
            return sum(self.blobs.unpin(info.key) for info in infos)

    def remove(self, infos: Sequence[BlobInfo]) -> int:
        """How many there still were. Engines may hold copies in memory until these make room."""
        keys = [info.key for info in infos]
        with self.explained():
            return sum(
                self.blobs.delete(keys[i : i + _BATCH], time.monotonic() + _DELETE_SECONDS)
                for i in range(0, len(keys), _BATCH)
            )

    def epoch(self, tag: bytes) -> int:
        """How often a tenant was erased here."""
        with self.explained():
            return self.blobs.epoch(tag, time.monotonic() + _DELETE_SECONDS)

    def erase(self, tenant: str, secret: bytes = b"") -> EraseReceipt:
        """Make everything of a tenant unreachable for every process on the folder, then remove it."""
        if self.blobs.read_only:
            raise StoreError(f"{self.root} is read-only: nothing can be erased there. Change its permissions.")
        eraser = Eraser([Medium(self.blobs, IOPool(1))], HostStore(0), secret)
        try:
            with self.explained():
                receipt = eraser.erase(eraser.scope(tenant).tag)
        finally:
            eraser.close()
        return replace(receipt, tiers={self.blobs.name: receipt.tiers[self.blobs.name]})


def _other_files(top: Path) -> tuple[int, int, int]:
    """Temporary files, damaged ones, and locks of processes."""
    counts: Counter[str] = Counter()
    for folder, _, files in os.walk(top):
        place = os.path.relpath(folder, top)
        for file in files:
            counts["temporary"] += file.startswith(_TEMP)
            counts["damaged"] += place == "damaged"
            counts["owners"] += place == "owners" and file.endswith(".lock")
    return counts["temporary"], counts["damaged"], counts["owners"]
