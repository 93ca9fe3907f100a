"""The disk tier's medium: one file a record in a local folder, shared by any number of processes.

::

    <root>/kvweave-store.json                     says that the folder is a store: {"format": 1}
    <root>/v1/<model>/<scope>/<xx>/<content>.kvr  records; their path follows from the key, so a lookup is one open
    <root>/v1/catalog.sqlite                      sizes, uses, pins (``store.catalog``)
    <root>/v1/epochs/<scope>                      how often a tenant was erased
    <root>/v1/owners/<process>.lock               locked while that process lives
    <root>/v1/damaged/*.bad                       the last values that failed their checks

KV can be turned back into text, so folders are 0700 and files 0600. A value is written under a temporary name and renamed
when it is complete. Its bytes are claimed in the catalogue before that; a claim whose owner is dead is settled by whoever
finds it. A lost catalogue is rebuilt from the files; pins, hits and use times are lost with it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvweave.core.keys import ChunkKey
from kvweave.errors import InvalidOption, StoreError
from kvweave.store.aligned import DIRECT, BufferPool, FileBlob, direct_works, is_aligned, write_all
from kvweave.store.base import BlobInfo, MissReason, PutHints, Rejected, TierError
from kvweave.store.catalog import (
    GHOSTS,
    ROOM,
    SUFFIX,
    Catalog,
    CatalogFull,
    Claim,
    Uncounted,
    Usage,
)
from kvweave.store.eviction import Cost, Entry, Limits, Need, Quota, make_policy, victims
from kvweave.store.folder import (
    READ_ONLY,
    Epochs,
    Owners,
    entries,
    folders,
    is_hex,
    make_folders,
    prepare_root,
    sync_folder,
    unlink,
)
from kvweave.store.record import FIRST_READ, decode_header

KEPT_DAMAGED = 16
FLUSH_SECONDS = 2.0
"""Uses are written to the catalogue this often."""
COUNT_SECONDS = 30.0
"""What the first write waits at most for the files to be counted."""
_TEMP = ".tmp-"
_ROUNDS = 8
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class DiskStats:
    """Counters since this process opened the folder; ``records``, ``bytes`` and ``free`` are as of now."""

    records: int
    bytes: int
    """With what is being written."""
    capacity: int | None
    free: int
    """Of the file system."""
    opens: int
    hits: int
    puts: int
    duplicates: int
    errors: int
    corrupt: int
    evictions: int
    evicted_bytes: int
    rebuilds: int
    """How often the catalogue was found damaged."""
    rebuild_seconds: float
    """What the last comparison of catalogue and files took."""
    rejected: dict[str, int] = field(default_factory=dict)


class DiskBlobs:
    """Values as files below ``root``, at most ``capacity`` bytes: a ``Blobs``. Thread-safe; not for use across a fork.

    ``capacity=None`` is for administration of a folder that engines use: no limit, and nothing is evicted.
    ``free_floor``: share of the file system that is left free. ``direct``: past the page cache (auto: where possible; reads
    of a read-only folder go through the cache). ``durability="durable"`` writes through to the device; with "cache", a
    record may be torn by a power failure, which its digests will tell. ``policy`` and quotas: ``store.eviction``.

    Raises ``InvalidOption`` if the folder can't be used. A folder that can't be written opens read-only.
    """

    min_read = 0
    ranged = True

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
        self._limits = Limits(capacity, default_quota or Quota(), dict(quotas or {}))
        self.name = name
        self.read_only = not prepare_root(root)
        self._folder = os.path.join(root, "v1")
        self._policy = policy
        self._free_floor = free_floor
        self._durable = durability == "durable"
        self._patience = patience
        self._pool = BufferPool()
        self._epochs = Epochs(f"{self._folder}/epochs")
        self._speed = 1e9
        self._lock = threading.Lock()
        self._uses: dict[str, tuple[int, float]] = {}
        self._ghosts: OrderedDict[str, None] = OrderedDict()
        self._refused: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._rebuild_seconds = 0.0
        self._closed = threading.Event()
        self._tried = threading.Event()
        self.reconciled = threading.Event()
        """Set when every file counts against the capacity."""
        self._reconciling = threading.Lock()
        self._unfinished: list[Claim] = []
        self._unsynced: set[str] = set()
        self._direct = False
        self._owners: Owners | None = None
        if self.read_only:
            self._tried.set()
            self.reconciled.set()
            return
        self._owners = Owners(f"{self._folder}/owners")
        self._temps = (f"{_TEMP}{self._owners.name}-{i:x}" for i in itertools.count())
        self._catalog = Catalog(Path(self._folder), patience)
        self._direct = direct != "off" and direct_works(f"{self._folder}/{next(self._temps)}")
        if direct == "on" and not self._direct:
            self._owners.close()
            raise InvalidOption(f"The file system of {root} doesn't take O_DIRECT. Use direct='auto'.")
        self._keeper = threading.Thread(target=self._keep, name=f"kvweave-{name}-keeper", daemon=True)
        self._keeper.start()

    @property
    def capacity(self) -> int | None:
        """Bytes; where none was given, what the engine that used the folder last was given."""
        if self._limits.capacity is not None or self.read_only:
            return self._limits.capacity
        return int(self._catalog.get("capacity")) or None

    @property
    def free_bytes(self) -> int:
        """Of the file system, for other than the superuser."""
        return self._file_system()[0]

    # Reading

    def open(self, key: ChunkKey, deadline: float) -> FileBlob | None:
        name = key.name
        self._count("opens")
        if name in self._refused:
            return None
        descriptor = -1
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (DIRECT if self._direct else 0)
            descriptor = os.open(self._path(name), flags)
            size = os.fstat(descriptor).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise self._failed(error) from error
        with self._lock:
            self._counts["hits"] += 1
            count, _ = self._uses.get(name, (0, 0.0))
            self._uses[name] = (count + 1, time.time())
        return FileBlob(descriptor, size, self._direct, self._pool, self._measured)

    def contains(self, key: ChunkKey) -> bool:
        """Neither counted nor a use."""
        name = key.name
        return name not in self._refused and os.path.exists(self._path(name))

    def was_evicted(self, key: ChunkKey) -> bool:
        """By this process, or by others before it started; the last ``GHOSTS`` of them."""
        return key.name in self._ghosts

    def ping(self, deadline: float) -> None:
        try:
            os.listdir(f"{self._folder}/epochs")
        except OSError as error:
            raise self._failed(error) from error

    # Writing

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        """See ``Blobs.put``. Never over capacity, quota or free-space floor; evicts where that makes room."""
        try:
            self._put(key.name, key.scope, value.cast("B"), hints, deadline)
        except Rejected as error:
            self._count(error.reason)
            raise
        except TierError:
            self._count("errors")
            raise
        except (CatalogFull, OSError) as error:
            code = errno.ENOSPC if isinstance(error, CatalogFull) else error.errno
            if code not in _FULL | READ_ONLY:
                raise self._failed(error) from error
            reason: Literal["no_room", "read_only"] = "no_room" if code in _FULL else "read_only"
            self._count(reason)
            raise Rejected(reason) from error

    def _put(self, name: str, scope: bytes, value: memoryview, hints: PutHints, deadline: float) -> None:
        if self.read_only:
            raise Rejected("read_only")
        self._refuse_stale(scope, hints.epoch)
        if name not in self._refused and os.path.exists(self._path(name)):
            self._count("duplicates")
            return
        if self._closed.is_set():
            raise TierError("io", "the store is closed")
        self._wait_until_counted(deadline)
        owner = self._owners.name if self._owners else ""
        temp = f"{os.path.dirname(name)}/{next(self._temps)}"
        claim = Claim(temp, name, len(value), owner, hints.epoch, hints.tokens, hints.prefill_ms or None)
        self._reserve(claim, scope)
        try:
            self._write(claim, scope, value, deadline)
        except BaseException:
            self._abandon(claim)
            raise
        self._refused.discard(name)
        self._ghosts.pop(name, None)
        self._count("puts")

    def _write(self, claim: Claim, scope: bytes, value: memoryview, deadline: float) -> None:
        """Temporary file, rename, row; what fails after the rename takes the record away again."""
        temp, final = f"{self._folder}/{claim.id}", self._path(claim.name)
        descriptor = self._create(temp, DIRECT if self._direct and is_aligned(value) else 0)
        try:
            os.fchmod(descriptor, 0o600)
            write_all(descriptor, value, deadline)
            if self._durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._refuse_stale(scope, claim.epoch)
        os.rename(temp, final)
        try:
            if self._durable:
                sync_folder(os.path.dirname(final))
            self._refuse_stale(scope, claim.epoch)
            self._catalog.settle(claim)
        except BaseException:
            os.unlink(final)
            raise

    def _create(self, temp: str, direct: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct
        for _ in range(3):  # an erasure may take an empty folder away right after it was made
            try:
                return os.open(temp, flags, 0o600)
            except FileNotFoundError:
                make_folders(self._folder, os.path.dirname(temp), self._durable)
        return os.open(temp, flags, 0o600)

    def _refuse_stale(self, scope: bytes, epoch: int) -> None:
        if self._epochs.read(scope) > epoch:
            raise Rejected("stale")

    def _abandon(self, claim: Claim) -> None:
        """Give up on a write: no file, no claim; tried again later where that fails now."""
        try:
            self._finish(claim)
        except (TierError, CatalogFull, OSError):
            self._count("errors")
            with self._lock:
                self._unfinished.append(claim)

    def _finish(self, claim: Claim) -> None:
        """Remove what a write that ended early left behind. The record counts if it is there and not of an erased tenant."""
        unlink(f"{self._folder}/{claim.id}")
        if self._epochs.read(_scope(claim.name)) > claim.epoch:
            unlink(self._path(claim.name))
        self._catalog.settle(claim)

    # Room

    def _reserve(self, claim: Claim, scope: bytes) -> None:
        """Claim the bytes, evicting as need be. Raises ``Rejected`` no_room or quota."""
        most = self._limits.of(scope).max
        if most is not None and claim.size > most:
            raise Rejected("quota")
        if self._limits.capacity is not None and claim.size > self._limits.capacity:
            raise Rejected("no_room")
        need: Need | None = None
        for attempt in range(_ROUNDS):
            try:
                need = self._catalog.reserve(claim, self._limits, self._spare, only_below_high=attempt == 0)
            except Uncounted:
                self._reconcile()
                continue
            if need is None:
                return
            if not self._make_room(claim, scope, need) and attempt:
                break
        raise Rejected("quota" if need is not None and need.own else "no_room")

    def _make_room(self, claim: Claim, scope: bytes, need: Need) -> bool:
        """True if something went, so that trying again makes sense."""
        if need.must and (self._settle_dead() or self._drop_damaged(0)):
            return True
        if self._limits.capacity is None:
            return False
        self._flush()
        now = time.time()
        policy = make_policy(self._policy, now, self._speed)
        chosen = victims(self._catalog.entries(), self._catalog.used(), self._limits, policy, now, scope, claim.size, need)
        own = sum(entry.size for entry in chosen if entry.scope == scope)
        if own < need.own or sum(entry.size for entry in chosen) < need.required:
            return False  # evicting all of these wouldn't be enough: keep them
        for i in range(0, len(chosen), 32):
            batch = chosen[i : i + 32]
            clock = max(policy.priority(entry) for entry in batch) if isinstance(policy, Cost) else 0.0
            gone = self._catalog.evict([entry.name for entry in batch], now, clock)
            with self._lock:
                self._counts["evictions"] += len(gone)
                self._counts["evicted_bytes"] += sum(size for _, size in gone)
                self._remember(name for name, _ in gone)
        return bool(chosen)

    def _remember(self, names: Iterable[str]) -> None:
        for name in names:
            self._ghosts[name] = None
        while len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)

    def _spare(self) -> int:
        free, total = self._file_system()
        return free - max(ROOM, int(self._free_floor * total))

    def _file_system(self) -> tuple[int, int]:
        """Free bytes and all bytes."""
        try:
            found = os.statvfs(self._folder)
        except OSError as error:
            raise TierError("io", str(error)) from error
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    # Removing

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        """Kept as one of the last ``KEPT_DAMAGED``, where its bytes still count, so that it can be looked at."""
        name = key.name
        self._count("corrupt")
        if self.read_only:
            self._refused.add(name)
            return
        bad = f"damaged/{name.replace('/', '-')}-{time.time_ns():x}.bad"
        try:
            size = os.stat(self._path(name)).st_size
            os.rename(self._path(name), f"{self._folder}/{bad}")
        except FileNotFoundError:
            self._sync([name])
            return
        except OSError as error:
            self._refused.add(name)
            raise self._failed(error) from error
        self._sync([name])
        try:
            self._catalog.claim(Claim(bad, name, size, ""))
            self._drop_damaged(KEPT_DAMAGED)
        except (TierError, CatalogFull, OSError):  # what can't be counted isn't kept
            self._count("errors")
            self._drop(bad)

    def _drop(self, bad: str) -> None:
        try:
            unlink(f"{self._folder}/{bad}")
            self._catalog.unclaim([bad])
        except (TierError, CatalogFull, OSError):  # counted by the next start, if it is still there then
            self._count("errors")

    def _drop_damaged(self, keep: int) -> bool:
        """Unlink all but the youngest ``keep`` damaged values; True if there were more."""
        folder = f"{self._folder}/damaged"
        files = sorted(os.listdir(folder), key=lambda file: file.rsplit("-", 1)[-1].rjust(24, "0"))
        old = files[: max(0, len(files) - keep)]
        for file in old:
            unlink(f"{folder}/{file}")
        if old:
            self._catalog.unclaim([f"damaged/{file}" for file in old])
        return bool(old)

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        return self._remove([key.name for key in keys])

    def _remove(self, names: Sequence[str]) -> int:
        self._refuse_read_only()
        try:
            removed = sum(unlink(self._path(name)) for name in names)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._sync(names)
        return removed

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        """See ``Blobs.erase``; also what is being written and damaged values. Raise the epoch first."""
        self._refuse_read_only()
        tag, names, size = scope.hex(), [], 0
        try:
            for name, entry in self._files(tag):
                with contextlib.suppress(FileNotFoundError):
                    length = entry.stat(follow_symlinks=False).st_size
                    os.unlink(entry.path)
                    if name:
                        names.append(name)
                        size += length
            bad = [file for file in os.listdir(f"{self._folder}/damaged") if f"-{tag}-" in file]
            for file in bad:
                unlink(f"{self._folder}/damaged/{file}")
            for model in folders(self._folder):
                for part in (*folders(f"{model}/{tag}"), f"{model}/{tag}"):
                    with contextlib.suppress(OSError):  # not empty: a new record came
                        os.rmdir(part)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._sync(names)
        self._catalog.unclaim([f"damaged/{file}" for file in bad])
        self._catalog.sync([entry.name for entry in self._catalog.listing(tag)])
        return len(names), size

    def _sync(self, names: Sequence[str]) -> None:
        """Files were removed: tell the catalogue, later if it can't be reached now."""
        try:
            self._catalog.sync(names)
        except (TierError, CatalogFull):
            self._count("errors")
            with self._lock:
                self._unsynced.update(names)

    # Tenants

    def epoch(self, scope: bytes, deadline: float) -> int:
        return self._epochs.read(scope)

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        self._refuse_read_only()
        self._epochs.raise_to(scope, epoch, self._patience)

    # Administration

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        """By the catalogue; by the files where there is none."""
        tag = None if scope is None else scope.hex()
        for entry in self._listed(tag):
            model, owner, _, content = (
                bytes.fromhex(part) if i != 2 else b"" for i, part in enumerate(entry.name.split("/"))
            )
            key = ChunkKey(model, owner, content)
            yield BlobInfo(key, entry.size, entry.created, entry.last_used, entry.hits, entry.pinned_until)

    def usage(self) -> dict[bytes, Usage]:
        """Bytes and records by scope tag."""
        if not self.read_only:
            self._tried.wait(COUNT_SECONDS)
            return self._catalog.usage()
        found: dict[bytes, Usage] = {}
        for entry in self._listed(None):
            old = found.get(entry.scope, Usage(0, 0))
            found[entry.scope] = Usage(old.bytes + entry.size, old.records + 1)
        return found

    def pin(self, key: ChunkKey, until: float, owner: str) -> bool:
        """Keep a record from eviction until a Unix time; False if there is none. At most half of the capacity is pinned."""
        now = time.time()
        if not now < until < float("inf"):
            raise InvalidOption(f"A pin must end some time from now on, not at {until}. Give an expiry in Unix seconds.")
        if self.read_only:
            raise StoreError(f"{self._folder} is read-only: nothing is evicted there, and nothing can be pinned.")
        capacity = self.capacity
        return self._catalog.pin(key.name, until, owner, now, None if capacity is None else capacity // 2)

    def unpin(self, key: ChunkKey) -> bool:
        """True if it was pinned."""
        self._refuse_read_only()
        return self._catalog.unpin(key.name, time.time())

    def stats(self) -> DiskStats:
        if self.read_only:
            used, records = {s: u.bytes for s, u in self.usage().items()}, self.usage()
        else:
            used, records = self._catalog.used(), self._catalog.usage()
        with self._lock:
            counts = {name: self._counts[name] for name in _COUNTED}
            return DiskStats(
                records=sum(usage.records for usage in records.values()),
                bytes=sum(used.values()),
                capacity=self._limits.capacity,
                free=self.free_bytes,
                rebuilds=0 if self.read_only else self._catalog.rebuilds,
                rebuild_seconds=self._rebuild_seconds,
                rejected={reason: self._counts[reason] for reason in _REASONS if self._counts[reason]},
                **counts,
            )

    def flush(self) -> None:
        """Write pending uses to the catalogue now."""
        if not self.read_only:
            self._flush()

    def close(self) -> None:
        """Open blobs stay readable."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._owners is None:
            return
        self._keeper.join()
        self._flush()
        self._catalog.close()
        self._owners.close()

    # Keeping the catalogue in step

    def _keep(self) -> None:
        """The background thread: counts the files, then writes uses and tries again what failed."""
        while True:
            try:
                if not self.reconciled.is_set():
                    self._reconcile()
                self._retry()
                self._flush()
                if self._policy == "cost":
                    self._learn_costs()
            except (TierError, CatalogFull, OSError):  # counted, and tried again in a moment; a put that needs it will raise
                self._count("errors")
            self._tried.set()
            if self._closed.wait(FLUSH_SECONDS):
                return

    def _wait_until_counted(self, deadline: float) -> None:
        if not self._tried.wait(max(0.0, min(COUNT_SECONDS, deadline - time.monotonic()))):
            raise TierError("busy", "the files are still being counted")
        if not self.reconciled.is_set():
            self._reconcile()

    def _reconcile(self) -> None:
        """Make the catalogue agree with the files, and settle what dead processes left. Raises ``TierError``."""
        with self._reconciling:
            start = time.monotonic()
            try:
                known = self._catalog.sizes()
                differing: list[str] = []
                temps: list[str] = []
                for name, entry in self._files():
                    if name is None:
                        temps.append(entry.path)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        if known.pop(name, -1) != entry.stat(follow_symlinks=False).st_size:
                            differing.append(name)
                self._catalog.sync(differing)
                self._catalog.sync(known)  # rows whose files weren't seen
                self._settle_dead()
                self._remove_dead_temps(temps)
                self._count_damaged()
            except OSError as error:
                raise TierError("io", str(error)) from error
            if self._limits.capacity is not None:
                self._catalog.set("capacity", self._limits.capacity)
            self._catalog.counted()
            ghosts = self._catalog.evicted()
            with self._lock:
                self._remember(ghosts)
            self._rebuild_seconds = time.monotonic() - start
            self.reconciled.set()

    def _settle_dead(self) -> bool:
        """Finish the writes of dead processes; True if there were any."""
        owners = self._owners
        dead = [c for c in self._catalog.claims() if c.owner and owners is not None and not owners.alive(c.owner)]
        for claim in dead:
            self._finish(claim)
        return bool(dead)

    def _remove_dead_temps(self, temps: Iterable[str]) -> None:
        if self._owners is None:
            return
        for path in temps:
            owner = os.path.basename(path).removeprefix(_TEMP).rpartition("-")[0]
            if not self._owners.alive(owner):
                unlink(path)
        self._owners.remove_dead()

    def _count_damaged(self) -> None:
        counted = {claim.id for claim in self._catalog.claims() if not claim.owner}
        found = {f"damaged/{file}" for file in os.listdir(f"{self._folder}/damaged")}
        self._catalog.unclaim(sorted(counted - found))
        for path in found - counted:
            parts = path.removeprefix("damaged/").split("-")
            if len(parts) == 5 and all(map(is_hex, parts[:4])):
                with contextlib.suppress(FileNotFoundError):
                    size = os.stat(f"{self._folder}/{path}").st_size
                    self._catalog.claim(Claim(path, "/".join(parts[:4]), size, ""))

    def _retry(self) -> None:
        with self._lock:
            unfinished, self._unfinished = self._unfinished, []
            unsynced, self._unsynced = self._unsynced, set()
        for claim in unfinished:
            self._abandon(claim)
        if unsynced:
            self._sync(list(unsynced))

    def _flush(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
        if uses:
            try:
                self._catalog.touch(uses)
            except (TierError, CatalogFull):  # only hints for eviction are lost
                self._count("errors")

    def _learn_costs(self) -> None:
        """Read what adopted records took to compute from their headers, a few at a time."""
        found: list[tuple[float | None, int, str]] = []
        for name in self._catalog.without_prefill(64):
            try:
                with open(self._path(name), "rb") as file:
                    header = decode_header(memoryview(file.read(FIRST_READ)), os.fstat(file.fileno()).st_size)
                found.append((header.prefill_ms or None, header.num_tokens, name))
            except (OSError, TierError):  # gone, or not a record: whoever opens it will find out
                found.append((None, 0, name))
        if found:
            self._catalog.set_prefill(found)

    # Files

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}{SUFFIX}"

    def _files(self, tag: str | None = None) -> Iterator[tuple[str | None, os.DirEntry[str]]]:
        """Files of all records, or of one scope: with the record's name, or None for temporary ones. Unsorted."""
        for model in folders(self._folder):
            for scope in folders(model) if tag is None else [f"{model}/{tag}"]:
                for part in folders(scope):
                    place = os.path.relpath(part, self._folder)
                    for entry in entries(part):
                        if entry.name.startswith(_TEMP):
                            yield None, entry
                        elif entry.name.endswith(SUFFIX) and is_hex(entry.name[: -len(SUFFIX)]):
                            yield f"{place}/{entry.name[: -len(SUFFIX)]}", entry

    def _listed(self, tag: str | None) -> list[Entry]:
        if not self.read_only:
            self._tried.wait(COUNT_SECONDS)
            self._flush()
            with contextlib.suppress(TierError, CatalogFull):  # the files know most of it as well
                return list(self._catalog.listing(tag))
        found = []
        for name, entry in self._files(tag):
            with contextlib.suppress(FileNotFoundError):
                at = entry.stat(follow_symlinks=False)
                if name is not None:
                    found.append(Entry(name, _scope(name), at.st_size, at.st_mtime, 0.0, 0, 0.0, 0.0, None, 0.0, 0.0))
        return found

    def _measured(self, length: int, seconds: float) -> None:
        if length >= 2**18 and seconds > 0:
            self._speed += 0.1 * (length / seconds - self._speed)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _failed(self, error: Exception) -> TierError:
        self._count("errors")
        return TierError("io", str(error))

    def _refuse_read_only(self) -> None:
        if self.read_only:
            raise TierError("io", f"{self._folder} is read-only")


_REASONS = ("no_room", "quota", "read_only", "stale")
_COUNTED = ("opens", "hits", "puts", "duplicates", "errors", "corrupt", "evictions", "evicted_bytes")


def _check_options(policy: str, free_floor: float, direct: str, durability: str) -> None:
    make_policy(policy, 0.0, 1.0)
    if not 0 <= free_floor < 1:
        raise InvalidOption(f"free_floor is {free_floor}. Give a share of the disk from 0 to below 1.")
    if direct not in ("auto", "on", "off") or durability not in ("cache", "durable"):
        raise InvalidOption(f"direct={direct!r}, durability={durability!r}: use auto, on or off; cache or durable.")


def _scope(name: str) -> bytes:
    return bytes.fromhex(name.split("/")[1])
