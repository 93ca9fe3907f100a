"""Tiers composed into one store: host memory first, then slower media in the order given.

A lookup asks the next tier only for what the ones before don't have. A record read in full moves up to host memory; what was
read in part is fetched again, at leisure. Writes to slow tiers happen behind the request. Whatever a tier does wrong is a
``Miss`` with a reason and a counter, never an error of the request.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvweave.core.keys import ChunkIdentity, ChunkKey, Scope
from kvweave.core.spec import KVLayout
from kvweave.errors import PinQuotaExceeded
from kvweave.store.base import (
    Blobs,
    ChunkRecord,
    EraseReceipt,
    Miss,
    PutHints,
    Reach,
    StoredChunk,
    StoreStats,
    TierError,
)
from kvweave.store.codec import CodecName, round_trip
from kvweave.store.erasure import Eraser
from kvweave.store.erasure_notes import Notes
from kvweave.store.eviction import check_pin
from kvweave.store.host import HostStore
from kvweave.store.io_pool import IOPool, Staging
from kvweave.store.ranking import Ranking, TextOrder
from kvweave.store.reader import KV, Loading
from kvweave.store.record import EncodeBuffer, encode
from kvweave.store.record_tier import OpenRecord, RecordTier, TierCounters
from kvweave.store.write_behind import WriteBehind

LOG = logging.getLogger("kvweave.store")
_EXIT_TIMEOUT = 30.0  # seconds a tier
_MOVES = 16  # records on their way between tiers in the background, at most: they hold what was read of them already


@dataclass(frozen=True)
class TierOptions:
    """How tiers behind host memory are used. Sizes in bytes, times in seconds."""

    codec: CodecName = "raw"
    threads: int = 4
    """Per tier."""
    least_job: int = 2**20
    """Bytes below which a read of its own costs more than it gains: layers of small models are read several at a time."""
    staging: int = 512 * 2**20
    """Most bytes of loads on their way."""
    write_queue: int = 2**30
    """Most bytes that wait to be written, per tier."""
    lookup_timeout: float = 2.0
    load_timeout: float = 10.0
    write_timeout: float = 60.0
    secret: bytes = b""
    """Shared by all machines that share a store; keys the tenants' keys."""
    writer: str = "kvweave"
    notes: Mapping[str, Path] = field(default_factory=dict)
    """By tier, a folder of this host where erasures are noted that the tier couldn't be told of."""


@dataclass(frozen=True)
class TierStats:
    """One slow tier: its counters, what waits to be written, and what never was."""

    counters: TierCounters
    queued_records: int
    queued_bytes: int
    dropped: dict[str, int]


@dataclass(frozen=True)
class _Upper:
    """Host memory, for what is read while a tenant's epoch stays what it was: nothing that was erased comes back."""

    host: HostStore
    current: Callable[[], bool]

    def admits(self, size: int) -> bool:
        return self.host.admits(size)

    def put(self, record: ChunkRecord) -> bool:
        return self.current() and self.host.put(record)


class TieredStore:
    """A ``ChunkStore`` of host memory and any number of media. Thread-safe; ``close`` writes what is queued."""

    def __init__(
        self,
        host: HostStore,
        media: Sequence[Blobs] = (),
        *,
        layout: KVLayout | None = None,
        options: TierOptions | None = None,
        ranking: Ranking | None = None,
    ) -> None:
        self.host = host
        self.options = options or TierOptions()
        self._ranking = ranking or TextOrder()
        self.staging = Staging(self.options.staging)
        if media and layout is None:
            raise ValueError("tiers need the layout of the model")
        self.tiers = [self._tier(m, layout) for m in media if layout is not None]
        self._writers = {
            tier.name: WriteBehind(
                _writer(tier, self._ranking, self.options),
                self.options.write_queue,
                patience=self.options.write_timeout,
            )
            for tier in self.tiers
        }
        notes = {name: Notes(folder) for name, folder in self.options.notes.items()}
        self._eraser = Eraser([tier.medium for tier in self.tiers], host, self.options.secret, notes)
        self._moving: dict[ChunkKey, Future[None]] = {}
        """Records on their way between tiers, in the background."""
        # A program that ends without closing the store still gets its queue written. What is registered must not refer to
        # the store, or it would never be freed.
        self._at_exit = weakref.finalize(self, _close_all, list(self._writers.values()))

    def _tier(self, medium: Blobs, layout: KVLayout) -> RecordTier:
        """With threads of its own: a medium that hangs takes none of another's."""
        loading = Loading(IOPool(self.options.threads, medium.name), self.staging, self.options.least_job)
        return RecordTier(medium, layout, self.options.codec, loading)

    @property
    def io_threads(self) -> int:
        return self.options.threads

    @property
    def immediate(self) -> bool:
        return not self.tiers

    def scope(self, tenant: str) -> Scope:
        return self._eraser.scope(tenant)

    def current(self, scope: Scope) -> bool:
        return self._eraser.known_epoch(scope.tag) == scope.epoch

    def find(self, wanted: Sequence[ChunkIdentity]) -> list[StoredChunk | Miss]:
        found = self.host.find(wanted)
        deadline = time.monotonic() + self.options.lookup_timeout
        for tier in self.tiers:
            missing = [i for i, one in enumerate(found) if isinstance(one, Miss)]
            for i, answer in zip(missing, self._ask(tier, [wanted[i] for i in missing], deadline), strict=True):
                before = found[i]
                if not isinstance(answer, Miss) or not isinstance(before, Miss) or _tells_more(answer, before):
                    found[i] = answer
        return found

    def _ask(self, tier: RecordTier, wanted: Sequence[ChunkIdentity], deadline: float) -> list[OpenRecord | Miss]:
        """One tier, which may not be asked for a tenant of whom it can't tell whether he was erased."""
        if not wanted:
            return []
        scope = wanted[0].key.scope  # a lookup is of one tenant
        blind = self._eraser.blind(tier.name, scope)
        if blind is not None:
            return [tier.missed(blind, len(one.token_ids)) for one in wanted]
        epoch = self._eraser.known_epoch(scope)
        upper = _Upper(self.host, lambda: self._eraser.known_epoch(scope) == epoch)
        return tier.find(wanted, deadline, upper, partial(self._promote_later, upper))

    def put(self, record: ChunkRecord, *, wait: bool = False, expires: float | None = None, tiers: Reach = "all") -> bool:
        if expires is not None:
            record = dataclasses.replace(record, expires=expires)
        kept = record
        if self.options.codec != "raw":  # all tiers must return the same numbers
            keys, values = round_trip(record.keys, record.values, self.options.codec)
            kept = dataclasses.replace(record, keys=keys, values=values)
        epoch = record.identity.epoch
        held = self._eraser.known_epoch(record.key.scope) == epoch and self.host.put(kept)
        if tiers == "memory":
            return held
        return self._write(record, epoch, wait=wait) or held  # what was computed before an erasure is refused by the media

    def wait_for_room(self) -> None:
        for writer in self._writers.values():
            writer.wait_for_room()

    def contains(self, identity: ChunkIdentity) -> bool:
        return self.host.contains(identity) or any(self._holds(tier, identity) for tier in self.tiers)

    def keep(self, identity: ChunkIdentity, *, wait: bool = False, tiers: Reach = "all") -> bool:
        if tiers == "memory":
            return self.contains(identity)
        record = self.host.peek(identity.key)
        if record is not None:
            self._write(record, identity.epoch, wait=wait)
            return True
        holding = [tier for tier in self.tiers if self._holds(tier, identity)]
        lacking = [self._writers[tier.name] for tier in self.tiers if tier not in holding]
        if holding and lacking:
            self._copy(holding[0], lacking, identity, wait=wait)
        return bool(holding)

    def pin(self, keys: Iterable[ChunkKey], until: float) -> set[ChunkKey]:
        check_pin(until)
        wanted, pinned, full = set(keys), set[ChunkKey](), None
        deadline = time.monotonic() + self.options.lookup_timeout
        pins = [partial(self.host.pin, wanted, until)]
        pins += [partial(tier.pin, wanted, until, self.options.writer, deadline) for tier in self.tiers]
        for pin in pins:
            try:
                pinned |= pin()
            except PinQuotaExceeded as error:
                full = error
        if full is not None and pinned < wanted:
            raise full
        return pinned

    def unpin(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        wanted = set(keys)
        deadline = time.monotonic() + self.options.lookup_timeout
        return self.host.unpin(wanted).union(*(tier.unpin(wanted, deadline) for tier in self.tiers))

    def pinned_bytes(self, scope: bytes | None = None) -> int:
        return self.host.pinned_bytes(scope)

    def remove(self, keys: Iterable[ChunkKey]) -> int:
        wanted = set(keys)
        for writer in self._writers.values():
            writer.cancel(wanted.__contains__)
        removed = self.host.remove(wanted)
        deadline = time.monotonic() + self.options.write_timeout
        for tier in self.tiers:
            try:
                removed = max(removed, tier.medium.call(partial(tier.blobs.delete, wanted, deadline), deadline))
            except TierError as error:
                LOG.warning("records could not be removed from tier %s: %s", tier.name, error)
        return removed

    def erase(self, tenant: str) -> EraseReceipt:
        """Make everything a tenant stored unreachable in every tier and process, then remove it."""
        tag = self.scope(tenant).tag
        for writer in self._writers.values():
            writer.cancel(lambda key: key.scope == tag)
        return self._eraser.erase(tag)

    def stats(self) -> StoreStats:
        return self.host.stats()

    @property
    def pending_erasures(self) -> int:
        """Removals that a tier couldn't be told of yet, or couldn't do; they are tried again."""
        return self._eraser.pending()

    def tier_stats(self) -> dict[str, TierStats]:
        """By tier, host memory not among them."""
        return {
            tier.name: TierStats(tier.snapshot(), *self._writers[tier.name].queued, dict(self._writers[tier.name].dropped))
            for tier in self.tiers
        }

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all queued writes and promotions are done; False if ``timeout`` (seconds, each) passed first."""
        written = all(writer.flush(timeout) for writer in self._writers.values())
        moved = not wait_for(list(self._moving.values()), timeout).not_done
        return moved and all(writer.flush(timeout) for writer in self._writers.values()) and written

    def close(self, timeout: float | None = 60.0) -> None:
        """Write what is queued (at most ``timeout`` seconds a tier), then close the media."""
        for writer in self._writers.values():
            writer.close(timeout)
        self._at_exit.detach()
        self._eraser.close()
        for tier in self.tiers:
            tier.medium.close()

    def _write(self, record: ChunkRecord, epoch: int, *, wait: bool) -> bool:
        """Queue a record for the tiers that lack it; True if one of them has it or will get it."""
        held = False
        for tier in self.tiers:
            held |= self._holds(tier, record.identity) or self._writers[tier.name].offer(record, epoch, wait=wait)
        return held

    def _holds(self, tier: RecordTier, identity: ChunkIdentity) -> bool:
        return tier.holds(identity.key, time.monotonic() + self.options.lookup_timeout)

    def _promote_later(self, upper: _Upper, tier: RecordTier, identity: ChunkIdentity, have: Mapping[int, KV]) -> None:
        """Read the layers that are missing into host memory when no request waits for the medium."""
        if not self.host.contains(identity):
            self._move(tier, identity, partial(tier.promote, upper.put), have)

    def _copy(self, tier: RecordTier, lacking: Sequence[WriteBehind], identity: ChunkIdentity, *, wait: bool) -> None:
        """Write a record of one tier to those that lack it: they may have been added later. In the background, unless
        ``wait``: then it is queued for writing when this returns.
        """

        def offer(record: ChunkRecord) -> None:
            for writer in lacking:
                writer.offer(record, identity.epoch)

        for writer in lacking if wait else ():
            writer.wait_for_room()
        moved = self._move(tier, identity, offer, {})
        if wait and moved is not None:
            wait_for([moved], self.options.load_timeout)

    def _move(
        self, tier: RecordTier, identity: ChunkIdentity, take: Callable[[ChunkRecord], None], have: Mapping[int, KV]
    ) -> Future[None] | None:
        """None if there is too much on its way already."""
        if identity.key in self._moving or len(self._moving) >= _MOVES:
            return self._moving.get(identity.key)
        deadline = self.options.load_timeout
        moved = tier.medium.later(lambda: tier.read_into(identity, take, time.monotonic() + deadline, have))
        self._moving[identity.key] = moved
        moved.add_done_callback(lambda _: self._moving.pop(identity.key, None))
        return moved


def _close_all(writers: Sequence[WriteBehind]) -> None:
    for writer in writers:
        writer.close(_EXIT_TIMEOUT)


def _writer(tier: RecordTier, ranking: Ranking, options: TierOptions) -> Callable[[ChunkRecord, int], None]:
    """What a write-behind does with a record. It refers to the tier alone, not to the store."""
    own = threading.local()

    def write(record: ChunkRecord, epoch: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = EncodeBuffer()
        value = encode(record, ranking, options.codec, options.writer, own.buffer)
        hints = PutHints(record.prefill_ms, len(record.identity.token_ids), epoch, record.expires)
        if not tier.put(record.key, value, hints, time.monotonic() + options.write_timeout):
            own.buffer.abandon()  # a medium that gave up may still be sending it

    return write


def _tells_more(answer: Miss, before: Miss) -> bool:
    """A failure tells more than an eviction, that more than an absence."""
    rank = {"absent": 0, "evicted": 1, "deleted": 1, "expired": 1}
    return rank.get(answer.reason, 2) > rank.get(before.reason, 2)
