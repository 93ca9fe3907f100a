"""The database of a store folder: its schema, and a connection that survives its loss and damage."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvweave.store.base import TierError
from kvweave.store.files import lock_file, private_file

ROOM = 2 * 2**20
"""Bytes that must stay free for the catalogue to grow: without them, making room would fail halfway."""
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
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
_T = TypeVar("_T")

_DAMAGE = (sqlite3.DatabaseError, ValueError, TypeError, IndexError)
"""What SQLite raises, and what rows that make no sense lead to."""


class CatalogFull(TierError):
    """The file system has no room for the catalogue itself."""


class _OtherVersion(sqlite3.DatabaseError):
    """Not a catalogue of this version, or not one at all."""


class Database:
    """``catalog.sqlite`` (WAL) in a folder, replaced by an empty one where it is missing or damaged. Thread-safe.

    Raises ``TierError`` busy (locked by others for ``patience`` seconds) or io, and ``CatalogFull``.
    """

    def __init__(self, folder: str, patience: float) -> None:
        self._folder = folder
        self._path = f"{folder}/catalog.sqlite"
        self._patience = patience
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self.rebuilds = 0
        """How often this process found it damaged."""

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """``work`` sees one state of the database, whatever others do meanwhile."""
        return self._run(work, "BEGIN")

    def write(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """``work`` as one transaction, while nobody else writes. It may be called again, on an empty database."""
        return self._run(work, "BEGIN IMMEDIATE")

    def _run(self, work: Callable[[sqlite3.Connection], _T], begin: str) -> _T:
        if not self._lock.acquire(timeout=self._patience):
            raise TierError("busy", "the catalogue is in use by another thread")
        try:
            try:
                return self._attempt(work, begin)
            except _DAMAGE as error:
                if isinstance(error, sqlite3.DatabaseError) and not _is_damage(error):
                    raise
                self._set_aside()
                return self._attempt(work, begin)
        except sqlite3.Error as error:
            raise _translated(error) from error
        except OSError as error:
            raise TierError("io", f"catalogue: {error}") from error
        finally:
            self._lock.release()

    def _attempt(self, work: Callable[[sqlite3.Connection], _T], begin: str) -> _T:
        db = self._connection()
        db.execute(begin)
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
        return CatalogFull("io", str(error))
    return TierError("io", f"catalogue: {error}")
