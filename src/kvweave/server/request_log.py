"""The last requests of each tenant: what was reused and why not, and by which earlier request that is judged.

One SQLite database, in memory or in a file. It holds accounting and keyed digests, never text, token ids or tenants' names.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvweave.core.report import TOKEN_KINDS
from kvweave.errors import ConfigError, RequestNotFound
from kvweave.server.explain import Earlier
from kvweave.server.shape import RequestShape

KEEP = 10_000
"""Requests remembered for each tenant."""
_VERSION = 1
_TABLES = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE requests(
  number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, request_id TEXT NOT NULL,
  context TEXT NOT NULL, finished REAL NOT NULL, published INTEGER NOT NULL, written INTEGER NOT NULL, expires REAL,
  shape TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX by_id ON requests(tenant, id);
CREATE INDEX by_request_id ON requests(tenant, request_id);
CREATE INDEX in_order ON requests(tenant, number);
CREATE TABLE landmarks(
  tenant TEXT NOT NULL, digest TEXT NOT NULL, context TEXT NOT NULL,
  number INTEGER NOT NULL REFERENCES requests ON DELETE CASCADE,
  PRIMARY KEY(tenant, digest, context, number)) WITHOUT ROWID;
CREATE INDEX landmarks_of ON landmarks(number);
"""
Row = tuple[Any, ...]
_EARLIER = "requests.id, shape, published, written, expires"


@dataclass(frozen=True)
class Logged:
    """One finished request. Times are unix seconds; ``record`` is what ``get`` returns, without any text."""

    id: str
    request_id: str
    shape: RequestShape
    finished: float
    published: int
    written: int
    record: dict[str, Any]
    expires: float | None = None


class RequestLog:
    """Thread-safe. ``path``: a file that outlives the process, readable by its owner alone; None: in memory.

    Raises ``ConfigError`` if the file can't be used.
    """

    def __init__(self, path: Path | None = None, keep: int = KEEP) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        try:
            self._db = _open(path)
            self._secret = _secret(self._db)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"The request log '{path}' can't be used: {error}. Give a file of its own in a folder that can be written."
            ) from error

    def key(self, tenant: str) -> bytes:
        """What a tenant's digests are keyed with, 32 bytes."""
        return blake3(tenant.encode(), key=self._secret).digest()

    def add(self, tenant: str, entry: Logged) -> None:
        """Remember a request; the tenant's oldest is forgotten beyond ``keep``."""
        name = self._name(tenant)
        row = (name, entry.id, entry.request_id, entry.shape.context, entry.finished, entry.published, entry.written)
        stored = (entry.expires, json.dumps(entry.shape.to_json()), json.dumps(entry.record))
        with self._lock, self._db as db:
            number = db.execute(f"INSERT INTO requests VALUES(NULL{', ?' * 10})", (*row, *stored)).lastrowid
            marks = [(name, digest, entry.shape.context, number) for _, digest in entry.shape.landmarks()]
            db.executemany("INSERT OR REPLACE INTO landmarks VALUES(?, ?, ?, ?)", marks)
            surplus = "SELECT number FROM requests WHERE tenant = ? ORDER BY number DESC LIMIT -1 OFFSET ?"
            db.execute(f"DELETE FROM requests WHERE number IN ({surplus})", (name, self._keep))

    def get(self, tenant: str, id: str) -> dict[str, Any]:
        """The record of a request, by object id or request id. Raises ``RequestNotFound``."""
        return json.loads(self._row(tenant, id, "record")[0])

    def shape(self, tenant: str, id: str) -> RequestShape:
        """Raises ``RequestNotFound``."""
        return RequestShape.from_json(json.loads(self._row(tenant, id, "shape")[0]))

    def best_match(self, tenant: str, shape: RequestShape, before: float) -> Earlier | None:
        """The tenant's request, finished ``before`` a unix time, whose prompt has most of its beginning in common.

        One of the same model and salt comes first: only that could have been reused. If none has anything in common, it is
        the last one of the same model and salt.
        """
        name = self._name(tenant)
        nearest_first = [digest for _, digest in sorted(shape.landmarks(), reverse=True)]
        here = f"SELECT {_EARLIER} FROM landmarks JOIN requests USING(number) WHERE landmarks.tenant = ? AND digest = ?"
        # One query a landmark, each answered by the first row of an index: thousands of requests may share a beginning.
        own = f"{here} AND landmarks.context = ? AND finished <= ? ORDER BY number DESC LIMIT 1"
        others = f"{here} AND landmarks.context != ? AND finished <= ? LIMIT 1"
        with self._lock:
            for query in (own, others):
                for digest in nearest_first:
                    row = self._db.execute(query, (name, digest, shape.context, before)).fetchone()
                    if row is not None:
                        return _earlier(row)
            last = f"SELECT {_EARLIER} FROM requests WHERE tenant = ? AND context = ? AND finished <= ?"
            row = self._db.execute(f"{last} ORDER BY number DESC LIMIT 1", (name, shape.context, before)).fetchone()
        return None if row is None else _earlier(row)

    def recent(self, tenant: str, limit: int) -> list[dict[str, Any]]:
        """Records of a tenant's last requests, the last one first."""
        query = "SELECT record FROM requests WHERE tenant = ? ORDER BY number DESC LIMIT ?"
        with self._lock:
            return [json.loads(row[0]) for row in self._db.execute(query, (self._name(tenant), limit))]

    def totals(self, tenant: str) -> dict[str, Any]:
        """Requests of a tenant that are remembered, and their prompt tokens by kind."""
        sums = ", ".join(f"coalesce(sum(json_extract(record, '$.tokens.{kind}')), 0)" for kind in TOKEN_KINDS)
        with self._lock:
            query = f"SELECT count(*), {sums} FROM requests WHERE tenant = ?"
            count, *tokens = self._db.execute(query, (self._name(tenant),)).fetchone()
        return {"count": count, "tokens": dict(zip(TOKEN_KINDS, tokens, strict=True))}

    def erase(self, tenant: str) -> int:
        """Forget all requests of a tenant; returns how many there were."""
        with self._lock:
            with self._db as db:
                erased = db.execute("DELETE FROM requests WHERE tenant = ?", (self._name(tenant),)).rowcount
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # what was erased isn't in the file any more
        return erased

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _name(self, tenant: str) -> str:
        return self.key(tenant).hex()[:32]

    def _row(self, tenant: str, id: str, column: str) -> Row:
        query = (
            f"SELECT {column} FROM requests WHERE tenant = ?1 AND (id = ?2 OR request_id = ?2) ORDER BY number DESC LIMIT 1"
        )
        with self._lock:
            row: tuple[Any, ...] | None = self._db.execute(query, (self._name(tenant), id)).fetchone()
        if row is None:
            raise RequestNotFound(
                f"No request '{id[:64]}' among the last {self._keep:,} of this tenant. "
                "Use the id of an answer, or its x-request-id."
            )
        return row


def _earlier(row: Row) -> Earlier:
    id, shape, published, written, expires = row
    return Earlier(id, RequestShape.from_json(json.loads(shape)), published, written, expires)


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite gives its other files the same permissions
        path.chmod(0o600)
    db = sqlite3.connect(path or ":memory:", check_same_thread=False)
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON", "foreign_keys = ON"):
        db.execute(f"PRAGMA {pragma}")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == 0:
        with db:
            db.executescript(f"{_TABLES} PRAGMA user_version = {_VERSION};")
    elif version != _VERSION:
        db.close()
        raise sqlite3.DatabaseError(f"its format is {version}, this version of kvweave reads {_VERSION}")
    return db


def _secret(db: sqlite3.Connection) -> bytes:
    """Made once for each log: digests of two logs can't be compared, nor guessed without it."""
    with db, closing(db.cursor()) as cursor:
        cursor.execute("INSERT OR IGNORE INTO meta VALUES('secret', ?)", (secrets.token_bytes(32),))
        row = cursor.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()
    return bytes(row[0])
