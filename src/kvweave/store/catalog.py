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

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from kvweave.errors import PinQuotaExceeded
from kvweave.store.base import TierError
from kvweave.store.catalog_db import Database
from kvweave.store.eviction import Entry, Limits, Need, decayed
from kvweave.store.files import Files, scope_of, size_of, unlink

GHOSTS = 65_536
"""Evicted names remembered, to tell "evicted" from "absent"."""
_BATCH = 256
_ENTRY = "name, scope, bytes, created, last_used, hits, heat, heat_at, prefill_ms, clock, pinned_until"


class Uncounted(TierError):
    """This catalogue is new: the files must be counted before anything may be written."""


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
    """What one scope holds, or all pins."""

    bytes: int
    records: int


class Catalog:
    """Thread-safe. Raises ``TierError`` busy (locked by others for ``patience`` seconds) or io, and ``CatalogFull``."""

    def __init__(self, files: Files, patience: float = 5.0) -> None:
        self._files = files
        self._db = Database(files.folder, patience)

    @property
    def rebuilds(self) -> int:
        """How often this process found it damaged."""
        return self._db.rebuilds

    def close(self) -> None:
        self._db.close()

    # Space

    def reserve(self, claim: Claim, limits: Limits, spare: Callable[[], int], *, only_below_high: bool) -> Need | None:
        """Enter ``claim`` if there is room; otherwise what must go first.

        ``spare``: bytes that may be written until the file system is too full, asked inside the transaction. Raises
        ``Uncounted``.
        """

        def work(db: sqlite3.Connection) -> Need | None:
            if not _meta(db, "counted"):
                raise Uncounted("busy", "the files are being counted")
            (unwritten,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM claims WHERE owner != ''").fetchone()
            need = limits.need(_used(db), scope_of(claim.name), claim.size, spare() - unwritten)
            if need.must or (only_below_high and need.wanted):
                return need
            _claim(db, claim)
            return None

        return self._db.write(work)

    def settle(self, claim: Claim) -> None:
        """The writing of ``claim`` is over, well or not: from now on the record counts if its file is there."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM claims WHERE id = ?", (claim.id,))
            self._sync(db, claim.name, claim)

        self._db.write(work)

    def moved(self, name: str, place: str) -> None:
        """A record's file was moved to ``place``: its bytes count there from now on, if they are still there."""

        def work(db: sqlite3.Connection) -> None:
            self._sync(db, name)
            size = size_of(self._files.path(place))
            if size is not None:
                _claim(db, Claim(place, name, size, ""))

        self._db.write(work)

    def unclaim(self, ids: Iterable[str]) -> None:
        if rows := [(i,) for i in ids]:
            self._db.write(lambda db: db.executemany("DELETE FROM claims WHERE id = ?", rows))

    def claims(self) -> list[Claim]:
        return self._db.read(lambda db: [Claim(*row) for row in db.execute("SELECT * FROM claims")])

    def sync(self, names: Iterable[str]) -> None:
        """Make the rows of these records agree with their files."""
        left = iter(names)

        def work(db: sqlite3.Connection) -> None:
            for name in batch:
                self._sync(db, name)

        while batch := list(islice(left, _BATCH)):
            self._db.write(work)

    def counted(self) -> None:
        """All files have been seen: sum up anew, and open the catalogue for writing."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM usage")
            db.execute("INSERT INTO usage SELECT scope, sum(bytes), count(*) FROM records GROUP BY scope")
            _set_meta(db, "counted", 1)

        self._db.write(work)

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

        return self._db.write(work)

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

        self._db.write(work)

    def set_prefill(self, found: Sequence[tuple[float | None, int, str]]) -> None:
        """Prefill in milliseconds and number of tokens by name, as read from headers."""
        self._db.write(lambda db: db.executemany("UPDATE records SET prefill_ms = ?, tokens = ? WHERE name = ?", found))

    def without_prefill(self, limit: int) -> list[str]:
        """Records nobody has looked into yet."""
        query = "SELECT name FROM records WHERE tokens IS NULL LIMIT ?"
        return self._db.read(lambda db: [row[0] for row in db.execute(query, (limit,))])

    # Pins

    def pin(self, name: str, until: float, owner: str, now: float, most: int | None) -> bool:
        """Keep a record from eviction; False if there is none. Raises ``PinQuotaExceeded`` above ``most`` bytes."""

        def work(db: sqlite3.Connection) -> bool:
            self._sync(db, name)
            row = db.execute("SELECT bytes FROM records WHERE name = ?", (name,)).fetchone()
            if row is None:
                return False
            pinned = "SELECT coalesce(sum(bytes), 0) FROM records WHERE pinned_until > ? AND name != ?"
            total = db.execute(pinned, (now, name)).fetchone()[0] + row[0]
            if most is not None and total > most:
                raise PinQuotaExceeded(
                    f"Pins would hold {total} bytes, of {most} allowed. Unpin some or raise the capacity."
                )
            db.execute("UPDATE records SET pinned_until = ?, pin_owner = ? WHERE name = ?", (until, owner, name))
            return True

        return self._db.write(work)

    def unpin(self, name: str, now: float) -> bool:
        """True if it was pinned."""
        query = "UPDATE records SET pinned_until = 0, pin_owner = '' WHERE name = ? AND pinned_until > ?"
        return self._db.write(lambda db: db.execute(query, (name, now)).rowcount > 0)

    def pinned(self, now: float) -> Usage:
        """What pins keep from eviction."""
        query = "SELECT coalesce(sum(bytes), 0), count(*) FROM records WHERE pinned_until > ?"
        return self._db.read(lambda db: Usage(*db.execute(query, (now,)).fetchone()))

    # Listing

    def entries(self) -> list[Entry]:
        """Every record, as eviction sees it."""
        return self._db.read(lambda db: [_entry(row) for row in db.execute(f"SELECT {_ENTRY} FROM records")])

    def listing(self, scope: str | None) -> Iterator[Entry]:
        """Every record, or those of one scope, by name; in pieces, so that nobody waits for the reader of a long list."""
        which = "scope = ?2" if scope is not None else "?2 IS NULL"
        query = f"SELECT {_ENTRY} FROM records WHERE name > ?1 AND {which} ORDER BY name LIMIT {_BATCH}"
        last = ""

        def work(db: sqlite3.Connection) -> list[Entry]:
            return [_entry(row) for row in db.execute(query, (last, scope))]

        while page := self._db.read(work):
            yield from page
            last = page[-1].name

    def sizes(self) -> dict[str, int]:
        """Bytes of every record by name."""
        return self._db.read(lambda db: dict(db.execute("SELECT name, bytes FROM records").fetchall()))

    def usage(self) -> dict[bytes, Usage]:
        """By scope tag, without what is being written."""
        query = "SELECT scope, bytes, records FROM usage WHERE records > 0"
        return self._db.read(lambda db: {bytes.fromhex(s): Usage(b, r) for s, b, r in db.execute(query)})

    def used(self) -> dict[bytes, int]:
        """Bytes by scope tag, with what is being written: what counts against capacity and quotas."""
        return self._db.read(_used)

    def evicted(self) -> list[str]:
        """Names of records that made room, oldest first."""
        return self._db.read(lambda db: [row[0] for row in db.execute("SELECT name FROM evicted ORDER BY id")])

    def get(self, name: str) -> float:
        """A number kept with the catalogue; 0 if it isn't there."""
        return self._db.read(lambda db: _meta(db, name))

    def set(self, name: str, value: float) -> None:
        self._db.write(lambda db: _set_meta(db, name, value))

    # Rows and files

    def _sync(self, db: sqlite3.Connection, name: str, claim: Claim | None = None) -> None:
        try:
            found = os.stat(self._files.record(name))
        except (FileNotFoundError, NotADirectoryError):
            db.execute("DELETE FROM records WHERE name = ?", (name,))
            return
        hints = (None, None) if claim is None else (claim.tokens, claim.prefill_ms)
        when = found.st_mtime if claim is None else time.time()
        db.execute(
            "INSERT INTO records(name, scope, bytes, tokens, prefill_ms, created, last_used, heat_at, clock) "
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(name) DO UPDATE SET bytes = excluded.bytes, "
            "tokens = coalesce(excluded.tokens, tokens), prefill_ms = coalesce(excluded.prefill_ms, prefill_ms)",
            (name, scope_of(name).hex(), found.st_size, *hints, *(when,) * 3, _meta(db, "clock")),
        )
        db.execute("DELETE FROM evicted WHERE name = ?", (name,))

    def _unlink(self, name: str) -> bool:
        """False if the file is still there."""
        try:
            unlink(self._files.record(name))
        except OSError:  # read-only or failing: it keeps its row, so the caller sees that no room was made
            return False
        return True


def _claim(db: sqlite3.Connection, claim: Claim) -> None:
    values = (claim.id, claim.name, claim.size, claim.owner, claim.epoch, claim.tokens, claim.prefill_ms)
    db.execute("INSERT OR REPLACE INTO claims VALUES(?, ?, ?, ?, ?, ?, ?)", values)


def _used(db: sqlite3.Connection) -> dict[bytes, int]:
    used = {
        bytes.fromhex(scope): int(size) for scope, size in db.execute("SELECT scope, bytes FROM usage WHERE records > 0")
    }
    for name, size in db.execute("SELECT name, bytes FROM claims"):
        used[scope_of(name)] = used.get(scope_of(name), 0) + int(size)
    return used


def _meta(db: sqlite3.Connection, name: str) -> float:
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return 0.0 if row is None else float(row[0])


def _set_meta(db: sqlite3.Connection, name: str, value: float) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (name, value))


def _entry(row: Sequence[Any]) -> Entry:
    return Entry(row[0], bytes.fromhex(row[1]), *row[2:])
