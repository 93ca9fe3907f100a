"""The catalogue of a store folder: what lies there, whose it is, what is being written and what is pinned.

One SQLite database (WAL) that all processes on the folder share. It is never needed to find a record, only to decide what
may be written and what must go. What it says about files can be found out again from the files (``sync``), so a damaged or
lost one is replaced by an empty one; pins, hits and the memory of evicted names are lost with it.

The rule that keeps it right without locks across I/O: whoever creates or removes a file calls ``sync`` or ``settle``
*afterwards*, and these look at the file inside the transaction. So the last one to look sees the last change. A crash in
between leaves either a claim (bytes counted, owner dead) or a row without a file (bytes counted); never a file that isn't
counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvweave.errors import StoreError
from kvweave.store.base import TierError
from kvweave.store.eviction import Entry, Limits, Need, decayed

SUFFIX = ".kvr"
GHOSTS = 65_536
"""Evicted names remembered, to tell "evicted" from "absent"."""
ROOM = 2 * 2**20
"""Bytes that must stay free for the catalogue to grow: without them, making room would fail halfway."""
_BATCH = 256
_VERSION = 1
_SCHEMA = """
CREATE TABLE records(name TEXT PRIMARY KEY, scope TEXT NOT NULL, bytes INTEGER NOT NULL, tokens INTEGER, prefill_ms REAL,
  created REAL NOT NULL, last_used REAL NOT NULL, hits INTEGER NOT NULL DEFAULT 0, heat REAL NOT NULL DEFAULT 1,
  heat_at REAL NOT NULL, clock REAL NOT NULL DEFAULT 0, pinned_until REAL NOT NULL DEFAULT 0,
  pin_owner TEXT NOT NULL DEFAULT '') WITHOUT ROWID;
CREATE INDEX records_by_scope ON records(scope, name);
CREATE TABLE usage(scope TEXT PRIMARY KEY, bytes INTEGER NOT NULL, records INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER added AFTER INSERT ON records BEGIN
  INSERT INTO usage VALUES(new.scope, new.bytes, 1)
  ON CONFLICT(scope) DO UPDATE SET bytes = bytes + excluded.bytes, records = records + 1; END;
CREATE TRIGGER removed AFTER DELETE ON records BEGIN
  UPDATE usage SET bytes = bytes - old.bytes, records = records - 1 WHERE scope = old.scope; END;
CREATE TRIGGER resized AFTER UPDATE OF bytes ON records BEGIN
  UPDATE usage SET bytes = bytes + new.bytes - old.bytes WHERE scope = new.scope; END;
CREATE TABLE claims(id TEXT PRIMARY KEY, name TEXT NOT NULL, bytes INTEGER NOT NULL, owner TEXT NOT NULL,
  epoch INTEGER NOT NULL, tokens INTEGER, prefill_ms REAL) WITHOUT ROWID;
CREATE TABLE evicted(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE meta(name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
"""
_ENTRY = "name, scope, bytes, created, last_used, hits, heat, heat_at, prefill_ms, clock, pinned_until"
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
_T = TypeVar("_T")


class Uncounted(Exception):
    """This catalogue is new: the files must be counted before anything may be written."""


class CatalogFull(Exception):
    """The file system has no room for the catalogue itself."""


class _OtherVersion(sqlite3.DatabaseError):
    """Not a catalogue of this version, or not one at all."""


@dataclass(frozen=True)
class Claim:
    """Bytes that count although no record shows them: a value being written, or a damaged one kept for inspection."""

    id: str
    """Path of the file below the catalogue's folder."""
    name: str
    """The record it will become, or was."""
    size: int
    owner: str
    """The process that writes it; "" for a damaged value."""
    epoch: int = 0
    tokens: int | None = None
    prefill_ms: float | None = None


class Usage(NamedTuple):
    """What one scope holds."""

    bytes: int
    records: int


class Catalog:
    """Thread-safe. Raises ``TierError`` busy (locked by others for ``patience`` seconds) or io, and ``CatalogFull``."""

    def __init__(self, folder: Path, patience: float = 5.0) -> None:
        self._folder = str(folder)
        self._path = os.path.join(self._folder, "catalog.sqlite")
        self._patience = patience
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self.rebuilds = 0
        """How often this process found it damaged."""

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    # Space

    def reserve(self, claim: Claim, limits: Limits, spare: Callable[[], int], *, only_below_high: bool) -> Need | None:
        """Enter ``claim`` if there is room; otherwise what must go first.

        ``spare``: bytes that may be written until the file system is too full, asked inside the transaction. Raises
        ``Uncounted``.
        """

        def work(db: sqlite3.Connection) -> Need | None:
            if not _meta(db, "counted"):
                raise Uncounted
            (unwritten,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM claims WHERE owner != ''").fetchone()
            need = limits.need(_used(db), _scope(claim.name), claim.size, spare() - unwritten)
            if need.must or (only_below_high and need.wanted):
                return need
            _claim(db, claim)
            return None

        return self._write(work)

    def settle(self, claim: Claim) -> None:
        """The writing of ``claim`` is over, well or not: from now on the record counts if its file is there."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM claims WHERE id = ?", (claim.id,))
            self._sync(db, claim.name, claim)

        self._write(work)

    def claim(self, claim: Claim) -> None:
        """Enter a claim, whether there is room or not."""
        self._write(lambda db: _claim(db, claim))

    def unclaim(self, ids: Sequence[str]) -> None:
        self._write(lambda db: db.executemany("DELETE FROM claims WHERE id = ?", [(i,) for i in ids]))

    def claims(self) -> list[Claim]:
        return self._read(lambda db: [Claim(*row) for row in db.execute("SELECT * FROM claims")])

    def sync(self, names: Iterable[str]) -> None:
        """Make the rows of these records agree with their files."""
        left = iter(names)

        def work(db: sqlite3.Connection) -> None:
            for name in batch:
                self._sync(db, name)

        while batch := list(islice(left, _BATCH)):
            self._write(work)

    def counted(self) -> None:
        """All files have been seen: sum up anew, and open the catalogue for writing."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM usage")
            db.execute("INSERT INTO usage SELECT scope, sum(bytes), count(*) FROM records GROUP BY scope")
            _set_meta(db, "counted", 1)

        self._write(work)

    def evict(self, names: Sequence[str], now: float, clock: float) -> list[tuple[str, int]]:
        """Remove these records unless they were pinned meanwhile; returns what went, with its size.

        The files go inside the transaction, so that a pin is kept or refused, never half. ``clock``: the policy's, at least.
        """

        def work(db: sqlite3.Connection) -> list[tuple[str, int]]:
            gone = []
            for name in names:
                row = db.execute("SELECT bytes, pinned_until FROM records WHERE name = ?", (name,)).fetchone()
                if row is None or row[1] > now or not self._unlink(name):
                    continue
                db.execute("DELETE FROM records WHERE name = ?", (name,))
                db.execute("INSERT OR REPLACE INTO evicted(name) VALUES(?)", (name,))
                gone.append((name, int(row[0])))
            db.execute("DELETE FROM evicted WHERE id <= (SELECT max(id) FROM evicted) - ?", (GHOSTS,))
            if clock > _meta(db, "clock"):
                _set_meta(db, "clock", clock)
            return gone

        return self._write(work)

    # Use

    def touch(self, uses: Mapping[str, tuple[int, float]]) -> None:
        """Add uses: how many of each record, and when the last was."""

        def work(db: sqlite3.Connection) -> None:
            clock = _meta(db, "clock")
            for name, (count, when) in uses.items():
                row = db.execute("SELECT heat, heat_at FROM records WHERE name = ?", (name,)).fetchone()
                if row is not None:
                    heat = decayed(row[0], when - row[1]) + count
                    db.execute(
                        "UPDATE records SET hits = hits + ?, last_used = ?, heat = ?, heat_at = ?, clock = ? WHERE name = ?",
                        (count, when, heat, when, clock, name),
                    )

        self._write(work)

    def set_prefill(self, found: Sequence[tuple[float | None, int, str]]) -> None:
        """Prefill in milliseconds and number of tokens by name, as read from headers."""
        self._write(lambda db: db.executemany("UPDATE records SET prefill_ms = ?, tokens = ? WHERE name = ?", found))

    def without_prefill(self, limit: int) -> list[str]:
        """Records nobody has looked into yet."""
        query = "SELECT name FROM records WHERE tokens IS NULL LIMIT ?"
        return self._read(lambda db: [row[0] for row in db.execute(query, (limit,))])

    # Pins

    def pin(self, name: str, until: float, owner: str, now: float, most: int | None) -> bool:
        """Keep a record from eviction; False if there is none. Raises ``StoreError`` if pins would exceed ``most`` bytes."""

        def work(db: sqlite3.Connection) -> bool:
            self._sync(db, name)
            row = db.execute("SELECT bytes FROM records WHERE name = ?", (name,)).fetchone()
            if row is None:
                return False
            pinned = "SELECT coalesce(sum(bytes), 0) FROM records WHERE pinned_until > ? AND name != ?"
            total = db.execute(pinned, (now, name)).fetchone()[0] + row[0]
            if most is not None and total > most:
                raise StoreError(f"Pins would hold {total} bytes, of {most} allowed. Unpin something or raise the capacity.")
            db.execute("UPDATE records SET pinned_until = ?, pin_owner = ? WHERE name = ?", (until, owner, name))
            return True

        return self._write(work)

    def unpin(self, name: str, now: float) -> bool:
        """True if it was pinned."""
        query = "UPDATE records SET pinned_until = 0, pin_owner = '' WHERE name = ? AND pinned_until > ?"
        return self._write(lambda db: db.execute(query, (name, now)).rowcount > 0)

    # Listing

    def entries(self) -> list[Entry]:
        """Every record, as eviction sees it."""
        return self._read(lambda db: [_entry(row) for row in db.execute(f"SELECT {_ENTRY} FROM records")])

    def listing(self, scope: str | None) -> Iterator[Entry]:
        """Every record, or those of one scope, by name; in pieces, so that nobody waits for the reader of a long list."""
        which = "scope = ?2" if scope is not None else "?2 IS NULL"
        query = f"SELECT {_ENTRY} FROM records WHERE name > ?1 AND {which} ORDER BY name LIMIT {_BATCH}"
        last = ""

        def work(db: sqlite3.Connection) -> list[Entry]:
            return [_entry(row) for row in db.execute(query, (last, scope))]

        while page := self._read(work):
            yield from page
            last = page[-1].name

    def sizes(self) -> dict[str, int]:
        """Bytes of every record by name."""
        return self._read(lambda db: dict(db.execute("SELECT name, bytes FROM records").fetchall()))

    def usage(self) -> dict[bytes, Usage]:
        """By scope tag, without what is being written."""
        query = "SELECT scope, bytes, records FROM usage WHERE records > 0"
        return self._read(lambda db: {bytes.fromhex(s): Usage(b, r) for s, b, r in db.execute(query)})

    def used(self) -> dict[bytes, int]:
        """Bytes by scope tag, with what is being written: what counts against capacity and quotas."""
        return self._read(_used)

    def evicted(self) -> list[str]:
        """Names of records that made room, oldest first."""
        return self._read(lambda db: [row[0] for row in db.execute("SELECT name FROM evicted ORDER BY id")])

    def get(self, name: str) -> float:
        """A number kept with the catalogue; 0 if it isn't there."""
        return self._read(lambda db: _meta(db, name))

    def set(self, name: str, value: float) -> None:
        self._write(lambda db: _set_meta(db, name, value))

    # Rows and files

    def _sync(self, db: sqlite3.Connection, name: str, claim: Claim | None = None) -> None:
        try:
            found = os.stat(self._record(name))
        except (FileNotFoundError, NotADirectoryError):
            db.execute("DELETE FROM records WHERE name = ?", (name,))
            return
        hints = (None, None) if claim is None else (claim.tokens, claim.prefill_ms)
        when = found.st_mtime if claim is None else time.time()
        db.execute(
            "INSERT INTO records(name, scope, bytes, tokens, prefill_ms, created, last_used, heat_at, clock) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(name) DO UPDATE SET bytes = excluded.bytes, "
            "tokens = coalesce(excluded.tokens, tokens), prefill_ms = coalesce(excluded.prefill_ms, prefill_ms)",
            (name, _scope(name).hex(), found.st_size, *hints, *(when,) * 3, _meta(db, "clock")),
        )
        db.execute("DELETE FROM evicted WHERE name = ?", (name,))

    def _unlink(self, name: str) -> bool:
        """False if the file is still there."""
        try:
            os.unlink(self._record(name))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # read-only or failing: it keeps its row, so the caller sees that no room was made
            return False
        return True

    def _record(self, name: str) -> str:
        return f"{self._folder}/{name}{SUFFIX}"

    # Connection

    def _read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return self._run(work, write=False)

    def _write(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return self._run(work, write=True)

    def _run(self, work: Callable[[sqlite3.Connection], _T], write: bool) -> _T:
        if not self._lock.acquire(timeout=self._patience):
            raise TierError("busy", "the catalogue is in use by another thread")
        try:
            try:
                return self._attempt(work, write)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside()
                return self._attempt(work, write)
        except sqlite3.Error as error:
            raise _translated(error) from error
        except OSError as error:
            raise TierError("io", f"catalogue: {error}") from error
        finally:
            self._lock.release()

    def _attempt(self, work: Callable[[sqlite3.Connection], _T], write: bool) -> _T:
        db = self._connection()
        if not write:
            return work(db)
        db.execute("BEGIN IMMEDIATE")
        try:
            result = work(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # what went wrong first is what counts
                    db.execute("ROLLBACK")
            raise
        return result

    def _connection(self) -> sqlite3.Connection:
        """The database that lies there now: it may have been set aside or deleted by others."""
        found = _identity(self._path)
        if self._db is not None and found == self._file is not None:
            return self._db
        self._disconnect()
        if found is None:
            self._create()
            found = _identity(self._path)
        db = sqlite3.connect(self._path, timeout=self._patience, isolation_level=None, check_same_thread=False)
        self._db, self._file = db, found
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {ROOM // 2 // 4096}")
        if db.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            raise _OtherVersion("the catalogue is of another version")
        if _identity(self._path) != found:
            self._file = None  # replaced while it was opened: open again next time
            raise TierError("busy", "the catalogue is being replaced")
        return db

    def _disconnect(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):  # nothing is left to be written, and nothing else can be done
                self._db.close()
        self._db = self._file = None

    def _create(self) -> None:
        """An empty catalogue, complete when it appears under its name."""
        with self._replacing():
            if os.path.exists(self._path):
                return
            for entry in os.scandir(self._folder):  # a WAL of another database would be replayed into this one
                if entry.name.startswith(("catalog.new", "catalog.sqlite-")):
                    os.unlink(entry.path)
            new = os.path.join(self._folder, "catalog.new")
            os.close(private_file(new))
            with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
            os.rename(new, self._path)

    def _set_aside(self) -> None:
        """Keep a damaged catalogue as ``catalog.bad``, unless another process has replaced it already."""
        broken = self._file
        self._disconnect()
        self.rebuilds += 1
        with self._replacing():
            if _identity(self._path) == broken and broken is not None:
                os.rename(self._path, os.path.join(self._folder, "catalog.bad"))

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        descriptor = private_file(os.path.join(self._folder, "catalog.lock"))
        try:
            lock_file(descriptor, self._patience)
            yield
        finally:
            os.close(descriptor)


def private_file(path: str) -> int:
    """A descriptor of ``path``, created if need be, readable by the owner alone whatever the umask."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def lock_file(descriptor: int, patience: float) -> None:
    """Lock an open file against other processes; ends with the descriptor. Raises ``TierError("busy")``."""
    limit = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                raise TierError("busy", "another process holds a lock of the store") from None
            time.sleep(0.005)


def _claim(db: sqlite3.Connection, claim: Claim) -> None:
    values = (claim.id, claim.name, claim.size, claim.owner, claim.epoch, claim.tokens, claim.prefill_ms)
    db.execute("INSERT OR REPLACE INTO claims VALUES(?, ?, ?, ?, ?, ?, ?)", values)


def _used(db: sqlite3.Connection) -> dict[bytes, int]:
    used = {
        bytes.fromhex(scope): int(size) for scope, size in db.execute("SELECT scope, bytes FROM usage WHERE records > 0")
    }
    for name, size in db.execute("SELECT name, bytes FROM claims"):
        used[_scope(name)] = used.get(_scope(name), 0) + int(size)
    return used


def _meta(db: sqlite3.Connection, name: str) -> float:
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return 0.0 if row is None else float(row[0])


def _set_meta(db: sqlite3.Connection, name: str, value: float) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (name, value))


def _entry(row: Sequence[Any]) -> Entry:
    return Entry(row[0], bytes.fromhex(row[1]), *row[2:])


def _scope(name: str) -> bytes:
    return bytes.fromhex(name.split("/")[1])


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_damage(error: sqlite3.Error) -> bool:
    known = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
    return known or isinstance(error, _OtherVersion) or str(error).startswith(("no such table", "no such column"))


def _translated(error: sqlite3.Error) -> Exception:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return TierError("busy", "the catalogue is locked by another process")
    if code == sqlite3.SQLITE_FULL:
        return CatalogFull(str(error))
    return TierError("io", f"catalogue: {error}")
