"""What leaves a full tier: policies order the records, quotas say whose records may go.

Nothing here does I/O. Sizes are in bytes, times in Unix seconds unless the name says otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvweave.errors import InvalidOption, suggest

HIGH, LOW = 0.9, 0.8
"""Shares of the capacity: eviction starts above the first and goes on down to the second. So it does
where a scope is at its maximum; at the floor of free space, the difference of what is stored goes at once. Choosing who
leaves takes a look at every record.
"""
HALF_LIFE = 3600.0
"""Seconds after which a hit counts half."""


class Entry(NamedTuple):
    """A stored record as eviction sees it."""

    name: str
    scope: bytes
    size: int
    created: float
    last_used: float
    hits: int
    heat: float
    """Hits an hour, decayed, as of ``heat_at``; storing counts as one."""
    heat_at: float
    prefill_ms: float | None
    """None: unknown."""
    clock: float
    """The policy's clock at the last use."""
    pinned_until: float


def check_pin(until: float) -> None:
    """Raises ``InvalidOption`` unless a pin until then has an end, and one that isn't over."""
    if not time.time() < until < math.inf:
        raise InvalidOption(f"A pin must end some time from now on, not at {until}. Give an expiry in Unix seconds.")


class EvictionPolicy(Protocol):
    def priority(self, entry: Entry) -> float:
        """The lowest goes first; among equals the least recently used."""
        ...


class Lru:
    """Least recently used first: hard to beat on real traffic, and explains itself."""

    def priority(self, entry: Entry) -> float:
        return entry.last_used


class Lfu:
    """Least often used first."""

    def priority(self, entry: Entry) -> float:
        return float(entry.hits)


class Fifo:
    """Oldest first."""

    def priority(self, entry: Entry) -> float:
        return entry.created


@dataclass(frozen=True)
class Cost:
    """What a byte saves, with ageing (GreedyDual-Size-Frequency): ``clock + value / bytes``.

    ``value = f * (S - T_load) - rent * bytes`` in milliseconds an hour: f = hits an hour now, S = the prefill a hit saves,
    T_load = bytes over the measured bandwidth. The clock is the highest priority that ever left, so that what isn't used
    falls behind however valuable it was. A value of zero or less isn't worth keeping: such records go before all others.
    A record of unknown S counts as saving twice what loading it takes.
    """

    now: float
    bytes_per_second: float
    rent: float = 0.0
    """Milliseconds an hour a byte must earn."""

    def value(self, entry: Entry) -> float:
        load_ms = 1000 * entry.size / max(1.0, self.bytes_per_second)
        saved_ms = 2 * load_ms if entry.prefill_ms is None else entry.prefill_ms
        return decayed(entry.heat, self.now - entry.heat_at) * (saved_ms - load_ms) - self.rent * entry.size

    def priority(self, entry: Entry) -> float:
        density = self.value(entry) / max(1, entry.size)
        return entry.clock + density if density > 0 else density


_POLICIES: dict[str, Callable[[float, float], EvictionPolicy]] = {
    "lru": lambda now, speed: Lru(),
    "lfu": lambda now, speed: Lfu(),
    "fifo": lambda now, speed: Fifo(),
    "cost": Cost,
}
POLICIES = tuple(_POLICIES)


def make_policy(name: str, now: float, bytes_per_second: float) -> EvictionPolicy:
    """The policy under present conditions; raises ``InvalidOption`` for an unknown name."""
    if name not in _POLICIES:
        raise InvalidOption(f"'{name}' is not an eviction policy. {suggest(name, POLICIES)}")
    return _POLICIES[name](now, bytes_per_second)


def decayed(heat: float, seconds: float) -> float:
    """``heat`` after a time; a clock that went backwards changes nothing."""
    return heat * 0.5 ** (max(0.0, seconds) / HALF_LIFE)


@dataclass(frozen=True)
class Quota:
    """Bytes of one scope: others never push it below ``reserved``, and it never holds more than ``max`` (None: no limit)."""

    reserved: int = 0
    max: int | None = None


@dataclass(frozen=True)
class Need:
    """Bytes that must go before a value can be stored, and how many more should go while at it."""

    own: int = 0
    """Of the writer's own scope, because of its maximum."""
    required: int = 0
    """Of anybody, because of the capacity or the floor of free space."""
    wanted: int = 0
    """Of anybody, to get down to the low mark; at least ``required``."""
    own_wanted: int = 0
    """Of the writer's own scope, to get down to the low mark of its maximum; at least ``own``."""

    @property
    def must(self) -> bool:
        return self.own > 0 or self.required > 0


@dataclass(frozen=True)
class Limits:
    """Capacity (None: no limit, nothing is ever evicted) and quotas by scope tag."""

    capacity: int | None
    default: Quota = field(default_factory=Quota)
    quotas: Mapping[bytes, Quota] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 0:
            raise InvalidOption(f"A store's capacity is {self.capacity} bytes. Give 0 or more.")
        for quota in (self.default, *self.quotas.values()):
            if quota.reserved < 0 or (quota.max is not None and quota.max < quota.reserved):
                raise InvalidOption(f"Quota {quota} makes no sense. Give 0 <= reserved <= max.")
        reserved = sum(quota.reserved for quota in self.quotas.values())
        if self.capacity is not None and reserved > self.capacity:
            raise InvalidOption(
                f"Quotas reserve {reserved} bytes of a capacity of {self.capacity}. Reserve less or raise the capacity."
            )

    def of(self, scope: bytes) -> Quota:
        return self.quotas.get(scope, self.default)

    def need(self, used: Mapping[bytes, int], scope: bytes, size: int, spare: int) -> Need:
        """What storing ``size`` bytes takes; ``spare``: bytes that may be written before the file system is too full."""
        most, mine, total = self.of(scope).max, used.get(scope, 0) + size, sum(used.values()) + size
        own = 0 if most is None else max(0, mine - most)
        own_wanted = 0 if most is None or not own else mine - int(LOW * most)
        required = max(0, size - spare)
        if self.capacity is None:
            return Need(own, required, required, own_wanted)
        wanted = required + int((HIGH - LOW) * (total - size)) if required else 0
        required = max(required, total - self.capacity)
        if total > HIGH * self.capacity:
            wanted = max(wanted, total - int(LOW * self.capacity))
        return Need(own, required, max(required, wanted), own_wanted)


def victims(
    entries: Iterable[Entry],
    used: Mapping[bytes, int],
    limits: Limits,
    policy: EvictionPolicy,
    now: float,
    scope: bytes,
    size: int,
    need: Need,
) -> list[Entry]:
    """Whom to evict so that ``scope`` can store ``size`` bytes; fewer than needed where quotas and pins forbid more.

    First the scope's own records if it is over its maximum. Then records of scopes over their maximum, then of scopes that
    stay at or above what is reserved for them. If that isn't enough for what is *required*: a scope within its reservation
    may take from those that have more than theirs, and any scope may give up records of its own.
    """
    movable = [entry for entry in entries if entry.pinned_until <= now]
    queue = sorted(movable, key=lambda entry: (policy.priority(entry), entry.last_used))
    left = dict(used)
    chosen: dict[str, Entry] = {}

    freed = 0

    def take(amount: int, may_go: Callable[[Entry], bool]) -> None:
        nonlocal freed
        for entry in queue:
            if freed >= amount:
                return
            if entry.name not in chosen and may_go(entry):
                chosen[entry.name] = entry
                freed += entry.size
                left[entry.scope] = left.get(entry.scope, 0) - entry.size

    def over_max(entry: Entry) -> bool:
        most = limits.of(entry.scope).max
        return most is not None and left.get(entry.scope, 0) > most

    take(need.own_wanted, lambda entry: entry.scope == scope)
    take(need.wanted, over_max)
    take(need.wanted, lambda entry: left.get(entry.scope, 0) - entry.size >= limits.of(entry.scope).reserved)
    if used.get(scope, 0) + size <= limits.of(scope).reserved:
        take(need.required, lambda entry: left.get(entry.scope, 0) > limits.of(entry.scope).reserved)
    take(need.required, lambda entry: entry.scope == scope)
    return list(chosen.values())
