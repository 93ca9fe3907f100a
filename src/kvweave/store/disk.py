"""The disk tier's medium: one file a record in a local folder, shared by any number of processes.

::

    <root>/kvweave-store.json                     says that the folder is a store: {"format": 1}
    <root>/v1/<model>/<scope>/<xx>/<content>.kvr  records; their path follows from the key, so a lookup is one open
    <root>/v1/catalog.sqlite                      sizes, uses, pins (``store.catalog``)
    <root>/v1/epochs/<scope>                      when a tenant was erased last
    <root>/v1/owners/<process>.lock               locked while that process lives
    <root>/v1/damaged/*.bad                       the last values that failed their checks

KV can be turned back into text, so folders are 0700 and files 0600. A value is written under a temporary name and renamed
when it is complete. Its bytes are claimed in the catalogue before that; a claim whose owner is dead is settled by whoever
finds it. A lost catalogue is rebuilt from the files; pins, hits and use times are lost with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from kvweave.core.keys import ChunkKey
from kvweave.errors import InvalidOption
from kvweave.store.aligned import DIRECT, BufferPool, FileBlob, direct_works
from kvweave.store.base import BlobInfo, MissReason, PutHints, Rejected, TierError
from kvweave.store.catalog import Catalog, Usage
from kvweave.store.catalog_db import CatalogFull
from kvweave.store.disk_cleanup import Cleanup, Damaged
from kvweave.store.disk_room import Room
from kvweave.store.disk_shared import Ghosts, Reads, Shared
from kvweave.store.disk_stats import COUNTED, REASONS, Counts, DiskStats
from kvweave.store.disk_upkeep import COUNT_SECONDS, Upkeep
from kvweave.store.disk_writer import Writer
from kvweave.store.eviction import Entry, Limits, Quota, check_pin, make_policy
from kvweave.store.files import FULL, READ_ONLY, Files, first_bytes, scope_of, unlink
from kvweave.store.folder import Epochs, Owners, prepare_root
from kvweave.store.record import PROLOGUE, expiry


class DiskBlobs:
    """Values as files below ``root``, at most ``capacity`` bytes: a ``Blobs``. Thread-safe; not for use across a fork.

    ``capacity=None`` is for administration of a folder that engines use: no limit, and nothing is evicted.
    ``free_floor``: share of the file system that is left free. ``direct``: past the page cache (auto: where possible; reads
    of a read-only folder go through the cache). ``durability="durable"`` writes through to the device; with "cache", a
    record may be torn by a power failure, which its digests will tell. ``policy`` and quotas: ``store.eviction``.

    Raises ``InvalidOption`` if the folder can't be used. A folder that can't be written opens read-only.
    """

    min_read = 0

    def __init__(
        self,
        root: Path,
        capacity: int | None,
        *,
        policy: str = "lru",
        default_quota: Quota | None = None,
        quotas: Mapping[bytes, Quota] | None = None,
        free_floor: float = 0.05,
        direct: Literal["auto", "on", "off"] = "auto",
        durability: Literal["cache", "durable"] = "cache",
        name: str = "disk",
        patience: float = 5.0,
    ) -> None:
        _check_options(policy, free_floor, direct, durability)
        limits = Limits(capacity, default_quota or Quota(), dict(quotas or {}))
        self.name = name
        root = root.absolute()  # whatever folder the process goes to later
        self.read_only = not prepare_root(root)
        self._limit = capacity
        self._patience = patience
        self._files = Files(os.path.join(root, "v1"))
        self._epochs = Epochs(self._files.path("epochs"))
        self._counts = Counts()
        self._reads = Reads(self._counts)
        self._pool = BufferPool()
        self._refused: set[str] = set()
        """Damaged records that couldn't be taken away."""
        self._parts: _Parts | None = None
        self._direct = False
        self.reconciled = threading.Event()
        """Set when every file counts against the capacity."""
        if self.read_only:
            self.reconciled.set()
            return
        owners = Owners(self._files.path("owners"))
        self._direct = direct != "off" and direct_works(self._files.path(f"owners/probe-{owners.name}"))
        if direct == "on" and not self._direct:
            owners.close()
            raise InvalidOption(f"The file system of {root} doesn't take O_DIRECT. Use direct='auto'.")
        shared = Shared.of(self._files, self._epochs, owners, self._reads, self._counts, patience)
        room = Room(shared, limits, policy, free_floor)
        upkeep = Upkeep(shared, capacity, policy == "cost", name)
        writer = Writer(shared, room, upkeep, self._direct, durability == "durable")
        self._parts = _Parts(owners, shared.catalog, shared.cleanup, shared.damaged, shared.ghosts, upkeep, writer)
        self.reconciled = upkeep.reconciled

    @property
    def capacity(self) -> int | None:
        """Bytes; where none was given, what the engine that used the folder last was given."""
        if self._limit is not None or self._parts is None:
            return self._limit
        return int(self._parts.catalog.get("capacity")) or None

    @property
    def free_bytes(self) -> int:
        """Of the file system, for other than the superuser."""
        return self._files.space()[0]

    # Reading

    def open(self, key: ChunkKey, deadline: float) -> FileBlob | None:
        self._counts.add("opens")
        if key.name in self._refused:
            return None
        descriptor = -1
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (DIRECT if self._direct else 0)
            descriptor = os.open(self._files.record(key.name), flags)
            size = os.fstat(descriptor).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise self._failed(error) from error
        self._counts.add("hits")
        if not self.read_only:
            self._reads.add(key.name)
        return FileBlob(descriptor, size, self._direct, self._pool, self._reads.measured)

    def contains(self, key: ChunkKey, deadline: float = float("inf")) -> bool:
        if key.name in self._refused:
            return False
        try:
            first = first_bytes(self._files.record(key.name), PROLOGUE)
        except OSError as error:
            raise self._failed(error) from error
        return first is not None and expiry(first) > time.time()

    def was_evicted(self, key: ChunkKey) -> bool:
        """By this process, or by others before it started; the last ``GHOSTS`` of them."""
        return self._parts is not None and key.name in self._parts.ghosts

    def ping(self, deadline: float) -> None:
        try:
            os.listdir(self._files.path("epochs"))
        except OSError as error:
            raise self._failed(error) from error

    # Writing

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        """See ``Blobs.put``. Never over capacity, quota or free-space floor; evicts where that makes room."""
        try:
            if self._parts is None:
                raise Rejected("read_only")
            new = self._parts.writer.put(key, value.cast("B"), hints, deadline, there=self.contains(key))
        except Rejected as error:
            self._counts.add(error.reason)
            raise
        except (CatalogFull, OSError) as error:
            code = errno.ENOSPC if isinstance(error, CatalogFull) else error.errno
            if code not in FULL | READ_ONLY:
                raise self._failed(error) from error
            reason: Literal["no_room", "read_only"] = "no_room" if code in FULL else "read_only"
            self._counts.add(reason)
            raise Rejected(reason) from error
        except TierError:
            self._counts.add("errors")
            raise
        self._counts.add("puts" if new else "duplicates")
        if new:
            self._refused.discard(key.name)
            self._parts.ghosts.forget(key.name)

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        """Kept as one of the last ``KEPT_DAMAGED``, where its bytes still count, so that it can be looked at."""
        self._counts.add("corrupt")
        if self._parts is None:
            self._refused.add(key.name)
            return
        try:
            self._parts.damaged.take(key.name)
        except OSError as error:
            self._refused.add(key.name)
            raise self._failed(error) from error

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        parts, names = self._writable(), [key.name for key in keys]
        try:
            return sum(unlink(self._files.record(name)) for name in names)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            parts.cleanup.removed(names)

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        """See ``Blobs.erase``; also what is being written and damaged values. Raise the epoch first."""
        parts, tag, size = self._writable(), scope.hex(), 0
        names: list[str] = []
        try:
            for name, entry in self._files.walk(tag):
                with contextlib.suppress(FileNotFoundError):
                    length = entry.stat(follow_symlinks=False).st_size
                    os.unlink(entry.path)
                    if name:
                        names.append(name)
                        size += length
            self._files.remove_empty(tag)
            parts.damaged.erase(tag)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            parts.cleanup.removed(names)
        parts.catalog.sync([entry.name for entry in parts.catalog.listing(tag)])  # rows of files that others removed
        return len(names), size

    # Tenants

    def epoch(self, scope: bytes, deadline: float) -> int:
        return self._epochs.read(scope)

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        self._writable()
        self._epochs.raise_to(scope, epoch, self._patience)

    # Administration

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        """By the catalogue; by the files where there is none."""
        for entry in self._listed(None if scope is None else scope.hex()):
            model, owner, _, content = entry.name.split("/")
            key = ChunkKey(bytes.fromhex(model), bytes.fromhex(owner), bytes.fromhex(content))
            yield BlobInfo(key, entry.size, entry.created, entry.last_used, entry.hits, entry.pinned_until)

    def usage(self) -> dict[bytes, Usage]:
        """Bytes and records by scope tag."""
        if self._parts is not None:
            self._parts.upkeep.tried.wait(COUNT_SECONDS)
            return self._parts.catalog.usage()
        found: dict[bytes, Usage] = {}
        for entry in self._listed(None):
            old = found.get(entry.scope, Usage(0, 0))
            found[entry.scope] = Usage(old.bytes + entry.size, old.records + 1)
        return found

    def pin(self, key: ChunkKey, until: float, owner: str) -> bool:
        """See ``Pinning.pin``. At most half of the capacity is pinned. Raises ``InvalidOption`` for an end that is over."""
        check_pin(until)
        catalog, capacity = self._writable().catalog, self.capacity
        return catalog.pin(key.name, until, owner, time.time(), None if capacity is None else capacity // 2)

    def unpin(self, key: ChunkKey) -> bool:
        """True if it was pinned."""
        return self._writable().catalog.unpin(key.name, time.time())

    def stats(self) -> DiskStats:
        parts = self._parts
        usage = self.usage() if parts is None else parts.catalog.usage()
        used = {scope: held.bytes for scope, held in usage.items()} if parts is None else parts.catalog.used()
        pinned = Usage(0, 0) if parts is None else parts.catalog.pinned(time.time())
        rejected = self._counts.of(REASONS)
        return DiskStats(
            records=sum(held.records for held in usage.values()),
            bytes=sum(used.values()),
            capacity=self._limit,
            free=self.free_bytes,
            rebuilds=0 if parts is None else parts.catalog.rebuilds,
            rebuild_seconds=0.0 if parts is None else parts.upkeep.seconds,
            pins=pinned.records,
            pinned_bytes=pinned.bytes,
            rejected={reason: number for reason, number in rejected.items() if number},
            **self._counts.of(COUNTED),
        )

    def flush(self) -> None:
        """Write pending uses to the catalogue now."""
        if self._parts is not None:
            self._reads.flush(self._parts.catalog)

    def close(self) -> None:
        """Open blobs stay readable."""
        if self._parts is not None and not self._parts.upkeep.closed:
            self._parts.upkeep.close()
            self._parts.catalog.close()
            self._parts.owners.close()

    def _listed(self, tag: str | None) -> list[Entry]:
        if self._parts is not None:
            self._parts.upkeep.tried.wait(COUNT_SECONDS)
            self.flush()
            with contextlib.suppress(TierError):  # the files know most of it as well
                return list(self._parts.catalog.listing(tag))
        found = []
        try:
            for name, entry in self._files.walk(tag):
                with contextlib.suppress(FileNotFoundError):
                    at = entry.stat(follow_symlinks=False)
                    if name is not None:
                        scope = scope_of(name)
                        found.append(Entry(name, scope, at.st_size, at.st_mtime, 0.0, 0, 0.0, 0.0, None, 0.0, 0.0))
        except OSError as error:
            raise self._failed(error) from error
        return found

    def _writable(self) -> _Parts:
        if self._parts is None:
            raise TierError("io", f"{self._files.folder} is read-only")
        return self._parts

    def _failed(self, error: Exception) -> TierError:
        self._counts.add("errors")
        return TierError("io", str(error))


class _Parts(NamedTuple):
    """What takes care of a folder that can be written."""

    owners: Owners
    catalog: Catalog
    cleanup: Cleanup
    damaged: Damaged
    ghosts: Ghosts
    upkeep: Upkeep
    writer: Writer


def _check_options(policy: str, free_floor: float, direct: str, durability: str) -> None:
    make_policy(policy, 0.0, 1.0)
    if not 0 <= free_floor < 1:
        raise InvalidOption(f"free_floor is {free_floor}. Give a share of the disk from 0 to below 1.")
    if direct not in ("auto", "on", "off") or durability not in ("cache", "durable"):
        raise InvalidOption(f"direct={direct!r}, durability={durability!r}: use auto, on or off; cache or durable.")
