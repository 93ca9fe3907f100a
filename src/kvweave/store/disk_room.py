"""Room on a disk: who may write how much, and who leaves for it."""

from __future__ import annotations

import time
from itertools import accumulate, islice

from kvweave.store.base import Rejected
from kvweave.store.catalog import Claim
from kvweave.store.catalog_db import ROOM
from kvweave.store.disk_shared import Shared
from kvweave.store.eviction import Cost, Entry, Limits, Need, make_policy, victims
from kvweave.store.files import scope_of

_ROUNDS = 8
_BATCH = 32


class Room:
    """Claims bytes for writes: never over capacity, quota or free-space floor; evicts where that makes room."""

    def __init__(self, shared: Shared, limits: Limits, policy: str, free_floor: float) -> None:
        self._files = shared.files
        self._catalog = shared.catalog
        self._cleanup = shared.cleanup
        self._damaged = shared.damaged
        self._reads = shared.reads
        self._ghosts = shared.ghosts
        self._counts = shared.counts
        self._limits = limits
        self._policy = policy
        self._free_floor = free_floor

    def reserve(self, claim: Claim) -> None:
        """Enter the claim, evicting as need be. Raises ``Rejected`` no_room or quota, ``TierError`` and ``OSError``."""
        most, capacity = self._limits.of(scope_of(claim.name)).max, self._limits.capacity
        if most is not None and claim.size > most:
            raise Rejected("quota")
        if capacity is not None and claim.size > capacity:
            raise Rejected("no_room")
        for attempt in range(_ROUNDS):
            need = self._catalog.reserve(claim, self._limits, self._spare, only_below_high=attempt == 0)
            if need is None:
                return
            if not self._make(claim, need) and attempt:
                break
        raise Rejected("quota" if need is not None and need.own else "no_room")

    def _make(self, claim: Claim, need: Need) -> bool:
        """True if something went, so that trying again makes sense."""
        if need.must and (self._cleanup.settle_dead() or self._damaged.drop(keep=0)):
            return True
        if self._limits.capacity is None:
            return False
        self._reads.flush(self._catalog)
        now, scope = time.time(), scope_of(claim.name)
        policy = make_policy(self._policy, now, self._reads.speed)
        chosen = victims(self._catalog.entries(), self._catalog.used(), self._limits, policy, now, scope, claim.size, need)
        own = sum(entry.size for entry in chosen if entry.scope == scope)
        if own < need.own or sum(entry.size for entry in chosen) < need.required:
            return False  # evicting all of these wouldn't be enough: keep them
        quota = _for_quota(chosen, need)
        for reason, leaving in (("quota_evictions", chosen[:quota]), ("capacity_evictions", chosen[quota:])):
            for i in range(0, len(leaving), _BATCH):
                batch = leaving[i : i + _BATCH]
                clock = max(map(policy.priority, batch)) if isinstance(policy, Cost) else 0.0
                self._evict(batch, reason, now, clock)
        return bool(chosen)

    def _evict(self, batch: list[Entry], reason: str, now: float, clock: float) -> None:
        gone = self._catalog.evict([entry.name for entry in batch], now, clock)
        self._counts.add(reason, len(gone))
        self._counts.add("evicted_bytes", sum(size for _, size in gone))
        self._ghosts.add(name for name, _ in gone)

    def _spare(self) -> int:
        free, total = self._files.space()
        return free - max(ROOM, int(self._free_floor * total))


def _for_quota(chosen: list[Entry], need: Need) -> int:
    """How many of the first victims leave because their scope is at its maximum: ``victims`` begins with those."""
    before = accumulate((entry.size for entry in chosen), initial=0)
    return sum(size < need.own_wanted for size in islice(before, len(chosen)))
