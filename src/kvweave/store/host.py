"""Chunk records in host memory: a byte budget, least recently used out first."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvweave.core.keys import ChunkIdentity, ChunkKey
from kvweave.errors import InvalidOption
from kvweave.store.base import ChunkRecord, Miss, MissReason, StoredChunk, StoreStats

_GHOSTS = 65_536  # keys remembered after eviction, to tell "evicted" from "absent": a few MiB at most


class HostStore:
    """An LRU of records, thread-safe. A record in use by a running request survives its eviction: the request holds it.

    ``tenant_quota`` bounds the bytes of one tenant, who then evicts his own records first.
    """

    name = "host"

    def __init__(self, budget_bytes: int, *, tenant_quota: int | None = None) -> None:
        if budget_bytes < 0:
            raise InvalidOption(f"chunk cache of {budget_bytes} bytes. Use 0 (off) or more.")
        self._budget = budget_bytes
        self._quota = budget_bytes if tenant_quota is None else tenant_quota
        self._records: OrderedDict[ChunkKey, ChunkRecord] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, MissReason] = OrderedDict()
        self._bytes: Counter[bytes] = Counter()
        """By scope."""
        self._hits = self._evictions = self._refused = 0
        self._misses: Counter[str] = Counter()
        self._lock = threading.Lock()

    def find(self, wanted: Sequence[ChunkIdentity]) -> list[StoredChunk | Miss]:
        return [self._find(one) for one in wanted]

    def _find(self, wanted: ChunkIdentity) -> StoredChunk | Miss:
        with self._lock:
            record = self._records.get(wanted.key)
            if record is not None and record.identity == wanted:
                self._hits += 1
                self._records.move_to_end(wanted.key)
                return record
            reason = "tokens" if record is not None else self._ghosts.get(wanted.key, "absent")
            self._misses[reason] += 1
            return Miss(reason, self.name)

    def put(self, record: ChunkRecord) -> bool:
        size, scope = record.num_bytes, record.key.scope
        with self._lock:
            if record.key in self._records:
                self._records.move_to_end(record.key)
                return True
            if not self.admits(size):
                self._refused += 1
                return False
            while self._bytes[scope] + size > self._quota:
                self._evict(next(k for k in self._records if k.scope == scope))
            while self._bytes.total() + size > self._budget:
                self._evict(next(iter(self._records)))
            self._records[record.key] = record
            self._ghosts.pop(record.key, None)
            self._bytes[scope] += size
        return True

    def contains(self, identity: ChunkIdentity) -> bool:
        with self._lock:
            return identity.key in self._records

    def admits(self, size: int) -> bool:
        """True if a record of so many bytes could be held at all."""
        return size <= min(self._budget, self._quota)

    def peek(self, key: ChunkKey) -> ChunkRecord | None:
        """The record, if it is held; neither counted nor a use."""
        with self._lock:
            return self._records.get(key)

    def remove(self, keys: Iterable[ChunkKey]) -> int:
        with self._lock:
            return len([self._drop(key, "deleted") for key in list(keys) if key in self._records])

    def erase(self, scope: bytes) -> tuple[int, int]:
        """Remove everything of one scope; (records, bytes)."""
        with self._lock:
            gone = [self._drop(key, "deleted") for key in list(self._records) if key.scope == scope]
            for key in [k for k in self._ghosts if k.scope == scope]:
                del self._ghosts[key]
            return len(gone), sum(r.num_bytes for r in gone)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                records=len(self._records),
                bytes=self._bytes.total(),
                budget=self._budget,
                hits=self._hits,
                misses=self._misses.total(),
                evictions=self._evictions,
                refused=self._refused,
                reasons=dict(self._misses),
            )

    def _evict(self, key: ChunkKey) -> None:
        self._evictions += 1
        self._drop(key, "evicted")

    def _drop(self, key: ChunkKey, reason: MissReason) -> ChunkRecord:
        old = self._records.pop(key)
        self._bytes[key.scope] -= old.num_bytes
        self._ghosts[key] = reason
        if len(self._ghosts) > _GHOSTS:
            self._ghosts.popitem(last=False)
        return old
