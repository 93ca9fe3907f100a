"""Chunk records in host memory: a byte budget, least recently used out first, but for those that are pinned."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvweave.core.keys import ChunkIdentity, ChunkKey
from kvweave.errors import InvalidOption, PinQuotaExceeded
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
        self._pins: dict[ChunkKey, float] = {}
        """Of records that are held: Unix times until which they stay."""
        self._bytes: Counter[bytes] = Counter()
        """By scope."""
        self._hits = self._evictions = self._refused = 0
        self._misses: Counter[str] = Counter()
        self._lock = threading.Lock()

    def find(self, wanted: Sequence[ChunkIdentity]) -> list[StoredChunk | Miss]:
        return [self._find(one) for one in wanted]

    def _find(self, wanted: ChunkIdentity) -> StoredChunk | Miss:
        with self._lock:
            record = self._alive(wanted.key)
            if record is not None and record.identity == wanted:
                self._hits += 1
                self._records.move_to_end(wanted.key)
                return record
            reason = "tokens" if record is not None else self._ghosts.get(wanted.key, "absent")
            self._misses[reason] += 1
            return Miss(reason, self.name)

    def put(self, record: ChunkRecord) -> bool:
        """Store a record; one that is held already lives on until the later of the two ends."""
        size, scope = record.num_bytes, record.key.scope
        with self._lock:
            held = self._alive(record.key)
            if held is not None:
                self._records[record.key] = replace(held, expires=max(held.expires, record.expires))
                self._records.move_to_end(record.key)
                return True
            leaving = self._victims(size, scope) if self.admits(size) else None
            if leaving is None:
                self._refused += 1
                return False
            for key in leaving:
                self._evictions += 1
                self._drop(key, "evicted")
            self._records[record.key] = record
            self._ghosts.pop(record.key, None)
            self._bytes[scope] += size
        return True

    def contains(self, identity: ChunkIdentity) -> bool:
        return self.peek(identity.key) is not None

    def admits(self, size: int) -> bool:
        """True if a record of so many bytes could be held at all."""
        return size <= min(self._budget, self._quota)

    def peek(self, key: ChunkKey) -> ChunkRecord | None:
        """The record, if it is held; neither counted nor a use."""
        with self._lock:
            return self._alive(key)

    def pin(self, keys: Iterable[ChunkKey], until: float) -> set[ChunkKey]:
        """Keep records from eviction until a Unix time, or until they expire; returns those that are held, and so pinned.

        Raises ``PinQuotaExceeded``, and pins nothing, where pins would take more than half of the budget.
        """
        with self._lock:
            held = {key for key in keys if self._alive(key) is not None}
            total = sum(self._records[key].num_bytes for key in {*held, *self._pinned()})
            if held and total > self._budget // 2:
                raise PinQuotaExceeded(
                    f"Pins would hold {total} bytes of host memory, of {self._budget // 2} allowed. "
                    "Unpin some or raise chunk_cache."
                )
            self._pins.update(dict.fromkeys(held, until))
            return held

    def unpin(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those that were pinned."""
        with self._lock:
            pinned = self._pinned().intersection(keys)
            for key in pinned:
                del self._pins[key]
            return pinned

    def pinned_bytes(self, scope: bytes | None = None) -> int:
        """What pins hold: of one scope, or of all."""
        with self._lock:
            return sum(self._records[key].num_bytes for key in self._pinned() if scope in (None, key.scope))

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
            pinned = self._pinned()
            return StoreStats(
                records=len(self._records),
                bytes=self._bytes.total(),
                budget=self._budget,
                hits=self._hits,
                misses=self._misses.total(),
                evictions=self._evictions,
                refused=self._refused,
                reasons=dict(self._misses),
                pins=len(pinned),
                pinned_bytes=sum(self._records[key].num_bytes for key in pinned),
            )

    def _alive(self, key: ChunkKey) -> ChunkRecord | None:
        """The record, if it is held and hasn't expired."""
        record = self._records.get(key)
        if record is not None and record.expires <= time.time():
            self._drop(key, "expired")
            return None
        return record

    def _pinned(self) -> set[ChunkKey]:
        now = time.time()
        return {key for key, until in self._pins.items() if until > now and self._records[key].expires > now}

    def _victims(self, size: int, scope: bytes) -> list[ChunkKey] | None:
        """Who leaves so that ``scope`` can store ``size`` bytes, its own first at its quota; None: too much is pinned."""
        own, total = self._bytes[scope] + size - self._quota, self._bytes.total() + size - self._budget
        if own <= 0 and total <= 0:
            return []
        pinned, leaving = self._pinned(), dict[ChunkKey, None]()
        for only_own in (True, False):
            for key, record in self._records.items():
                if (own if only_own else total) <= 0:
                    break
                if key in pinned or key in leaving or (only_own and key.scope != scope):
                    continue
                leaving[key] = None
                total -= record.num_bytes
                own -= record.num_bytes if key.scope == scope else 0
        return list(leaving) if own <= 0 and total <= 0 else None

    def _drop(self, key: ChunkKey, reason: MissReason) -> ChunkRecord:
        old = self._records.pop(key)
        self._pins.pop(key, None)
        self._bytes[key.scope] -= old.num_bytes
        self._ghosts[key] = reason
        if len(self._ghosts) > _GHOSTS:
            self._ghosts.popitem(last=False)
        return old
