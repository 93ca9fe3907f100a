"""Chunk records in host memory: a byte budget, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvweave.core.keys import ChunkKey
from kvweave.errors import InvalidOption
from kvweave.store.base import ChunkRecord, StoreStats

_GHOSTS = 65_536  # keys remembered after eviction, to tell "evicted" from "never seen": 1 MiB of keys at most


class HostStore:
    """An LRU of records, thread-safe. A record in use by a running request survives its eviction: the request holds it."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise InvalidOption(f"chunk cache of {budget_bytes} bytes. Use 0 (off) or more.")
        self._budget = budget_bytes
        self._records: OrderedDict[ChunkKey, ChunkRecord] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._bytes = 0
        self._hits = self._misses = self._evictions = self._refused = 0
        self._lock = threading.Lock()

    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkRecord | None]:
        with self._lock:
            found = [self._records.get(key) for key in keys]
            for key, record in zip(keys, found, strict=True):
                if record is None:
                    self._misses += 1
                else:
                    self._hits += 1
                    self._records.move_to_end(key)
            return found

    def put(self, record: ChunkRecord) -> bool:
        size = record.num_bytes
        with self._lock:
            if record.key in self._records:
                self._records.move_to_end(record.key)
                return True
            if size > self._budget:
                self._refused += 1
                return False
            while self._bytes + size > self._budget:
                self._evict()
            self._records[record.key] = record
            self._ghosts.pop(record.key, None)
            self._bytes += size
            return True

    def contains(self, key: ChunkKey) -> bool:
        """True if the record is held; neither counted nor a use."""
        with self._lock:
            return key in self._records

    def missing_reason(self, key: ChunkKey) -> str:
        with self._lock:
            return "evicted" if key in self._ghosts else "never_seen"

    def remove(self, keys: Iterable[ChunkKey]) -> int:
        with self._lock:
            gone = [r for key in keys if (r := self._records.pop(key, None)) is not None]
            self._bytes -= sum(r.num_bytes for r in gone)
            return len(gone)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                records=len(self._records),
                bytes=self._bytes,
                budget=self._budget,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                refused=self._refused,
            )

    def _evict(self) -> None:
        key, old = self._records.popitem(last=False)
        self._bytes -= old.num_bytes
        self._evictions += 1
        self._ghosts[key] = None
        if len(self._ghosts) > _GHOSTS:
            self._ghosts.popitem(last=False)
