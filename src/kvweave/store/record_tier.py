"""Records on a medium: opening them with every check that a right answer needs, writing, verifying."""

from __future__ import annotations

import copy
import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from kvweave.core.keys import ChunkIdentity, ChunkKey
from kvweave.core.spec import KVLayout
from kvweave.store.base import (
    DAMAGED,
    Blob,
    Blobs,
    ChunkRecord,
    Miss,
    MissReason,
    Pinning,
    PutHints,
    Rejected,
    TierError,
    Upper,
    contained,
)
from kvweave.store.codec import CodecName, layer_rows
from kvweave.store.medium import Medium
from kvweave.store.reader import KV, Extents, Loading, LoadResult, RecordReader, SharedBlob, Source, make_units, read_unit
from kvweave.store.record import FIRST_READ, Header, check_identity, decode_header, header_length

LOG = logging.getLogger("kvweave.store")
Promote = Callable[[ChunkRecord], object]
PromoteLater = Callable[["RecordTier", ChunkIdentity, Mapping[int, KV]], None]
"""Told of a record that was of use, and of the layers of it that were read in full."""
_RETRACT = 1.0  # seconds for taking away what turned out to be damaged while it was read
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds; upper bounds of the classes of ``Times``, a last one without a bound behind them."""


@dataclass
class Times:
    """How long something took, as a histogram."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0
    """Seconds."""

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass
class TierCounters:
    """Since the tier was opened."""

    opens: int = 0
    hits: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)
    hit_tokens: int = 0
    missed_tokens: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    """ok, dropped (closed before the last layer), or the reason of a load that failed."""
    whole_loads: Counter[str] = field(default_factory=Counter)
    """Those of ``loads`` that wanted all rows of all layers."""
    puts: Counter[str] = field(default_factory=Counter)
    """ok, or why not: io, no_room, quota, read_only, stale."""
    bytes_written: int = 0
    write_seconds: float = 0.0
    bytes_read: int = 0
    rows_read: int = 0
    """Those of every layer."""
    load_seconds: float = 0.0
    load_times: Times = field(default_factory=Times)
    """Of the loads that are ok. A load's seconds add up over the threads that read for it."""
    first_times: Times = field(default_factory=Times)
    """Of the loads that are ok: from the begin until the first read was done."""
    put_times: Times = field(default_factory=Times)
    saved_seconds: float = 0.0
    """Where loading took less than computing would have: the sum of the differences."""
    lost_seconds: float = 0.0
    """Where loading took longer."""
    promotions: Counter[bool] = field(default_factory=Counter)
    """Records that host memory took, or didn't."""
    damaged: Counter[MissReason] = field(default_factory=Counter)
    """Records that were found to be wrong for good."""
    discards_failed: int = 0
    """Damaged or expired records that the medium couldn't take away."""

    def copy(self) -> TierCounters:
        return copy.deepcopy(self)


class OpenRecord:
    """A record that was opened and checked; a ``StoredChunk``. ``close`` gives its descriptor back."""

    def __init__(self, source: Source, loading: Loading) -> None:
        self._source = source
        self._loading = loading
        self._readers: list[RecordReader] = []

    @property
    def identity(self) -> ChunkIdentity:
        return self._source.header.identity

    @property
    def header(self) -> Header:
        return self._source.header

    @property
    def tier(self) -> str:
        return self._source.tier

    def read(self, tokens: Tensor, first_layer: int, ticket: int, timeout: float) -> RecordReader:
        deadline = time.monotonic() + timeout
        reader = RecordReader(self._source, tokens, first_layer, ticket, deadline, self._loading)
        self._readers.append(reader)
        return reader

    def read_all(self, deadline: float, have: Mapping[int, KV]) -> ChunkRecord:
        """The whole record, on this thread: ``have``, the last of its layers, and those below. Raises ``TierError``."""
        header = self._source.header
        layers = len(header.layers)
        extents = Extents.of(header, np.arange(header.num_tokens))
        units = make_units(header, extents, range(layers - len(have)), self._source.min_read, header.total)
        kv: dict[int, KV] = dict(have)
        for unit in units:
            kv |= read_unit(self._source, unit, extents, deadline)
        keys, values = (tuple(kv[i][j] for i in range(layers)) for j in (0, 1))
        return ChunkRecord(header.identity, keys, values, header.prefill_ms, header.expires)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._source.blob.close()


class RecordTier:
    """Records on one medium for one model layout. Thread-safe."""

    def __init__(self, blobs: Blobs, layout: KVLayout, codec: CodecName, loading: Loading) -> None:
        self.medium = Medium(blobs, loading.pool)
        self.blobs = blobs
        self.name = blobs.name
        self.counters = TierCounters()
        self._layers = layer_rows(layout)
        self._dtype = layout.dtype
        self._codec = codec
        self._loading = loading
        self._lock = threading.Lock()

    def find(
        self,
        wanted: Sequence[ChunkIdentity],
        deadline: float,
        promote: Upper | None = None,
        promote_later: PromoteLater | None = None,
    ) -> list[OpenRecord | Miss]:
        """Open records, all at once, each on its own. ``deadline`` in ``time.monotonic()`` seconds."""

        if self.medium.pool.stuck:  # whoever doesn't answer isn't asked again
            return [self.missed("breaker", len(one.token_ids)) for one in wanted]

        def open_one(one: ChunkIdentity) -> OpenRecord | Miss:
            return self.open(one, deadline, promote, promote_later)

        opens = [self.medium.start(partial(open_one, one)) for one in wanted]
        found: list[OpenRecord | Miss] = []
        for future in opens:
            try:
                found.append(future.result(timeout=max(0.0, deadline - time.monotonic())))
            except (TimeoutError, CancelledError):
                self.medium.pool.give_up(future)
                future.add_done_callback(_close_late)
                found.append(self.missed("deadline", len(wanted[len(found)].token_ids)))
        return found

    def open(
        self,
        wanted: ChunkIdentity,
        deadline: float,
        promote: Upper | None = None,
        promote_later: PromoteLater | None = None,
    ) -> OpenRecord | Miss:
        """Open one record on this thread."""
        try:
            with contained(self.name):
                opened = self._open(wanted, deadline)
                gone = opened is None and self.blobs.was_evicted(wanted.key)
        except TierError as error:
            self._retract(wanted.key, error.reason, deadline)
            return self.missed(error.reason, len(wanted.token_ids))
        if opened is None:
            return self.missed("evicted" if gone else "absent", len(wanted.token_ids))
        with self._lock:
            self.counters.opens += 1
            self.counters.hits += 1
            self.counters.hit_tokens += len(wanted.token_ids)
        blob, header = opened
        if promote is not None and not promote.admits(header.total):
            promote = promote_later = None
        source = Source(
            tier=self.name,
            header=header,
            blob=blob,
            min_read=self.blobs.min_read,
            damaged=lambda reason: self._retract(wanted.key, reason, time.monotonic() + _RETRACT),
            finished=partial(self._count_load, header),
            promote=None if promote is None else partial(self.promote, promote.put),
            promote_later=None if promote_later is None else partial(promote_later, self, wanted),
        )
        return OpenRecord(source, self._loading)

    def holds(self, key: ChunkKey, deadline: float) -> bool:
        """True if the medium has such a value; neither counted nor a use. Whether it is right shows when it is read."""
        try:
            return self.medium.call(lambda: self.blobs.contains(key, deadline), deadline)
        except TierError as error:
            LOG.warning("tier %s can't tell whether it holds a record: %s", self.name, error)
            return False

    def pin(self, keys: Iterable[ChunkKey], until: float, owner: str, deadline: float) -> set[ChunkKey]:
        """Those that are pinned now. Raises ``PinQuotaExceeded`` if one couldn't be for want of room for pins."""
        return self._each(keys, lambda medium, key: medium.pin(key, until, owner), deadline)

    def unpin(self, keys: Iterable[ChunkKey], deadline: float) -> set[ChunkKey]:
        """Those that were pinned."""
        return self._each(keys, lambda medium, key: medium.unpin(key), deadline)

    def _each(self, keys: Iterable[ChunkKey], work: Callable[[Pinning, ChunkKey], bool], deadline: float) -> set[ChunkKey]:
        medium = self.blobs
        if not isinstance(medium, Pinning):
            return set()
        try:
            return self.medium.call(lambda: {key for key in keys if work(medium, key)}, deadline)
        except TierError as error:
            LOG.warning("tier %s can't change pins: %s", self.name, error)
            return set()

    def read_into(self, identity: ChunkIdentity, take: Promote, deadline: float, have: Mapping[int, KV]) -> None:
        """Read what is missing of a record on this thread; what goes wrong is counted."""
        found = self.open(identity, deadline)
        if isinstance(found, Miss):
            return
        try:
            with contained(self.name):
                record = found.read_all(deadline, have)
            take(record)
        except TierError as error:
            self._retract(identity.key, error.reason, deadline)
            self._count_load(found.header, LoadResult(error.reason, whole=True))
        finally:
            found.close()

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> bool:
        """Write an encoded record; False, counted, if the medium refused or failed."""
        start = time.perf_counter()
        try:
            with contained(self.name):
                self.blobs.put(key, value, hints, deadline)
        except (TierError, Rejected) as error:
            with self._lock:
                self.counters.puts[error.reason] += 1
            return False
        seconds = time.perf_counter() - start
        with self._lock:
            self.counters.puts["ok"] += 1
            self.counters.bytes_written += len(value)
            self.counters.write_seconds += seconds
            self.counters.put_times.add(seconds)
        return True

    def snapshot(self) -> TierCounters:
        """A copy of the counters, all of one moment."""
        with self._lock:
            return self.counters.copy()

    def _open(self, wanted: ChunkIdentity, deadline: float) -> tuple[SharedBlob, Header] | None:
        found = self.blobs.open(wanted.key, deadline)
        if found is None:
            return None
        blob = SharedBlob(found)
        try:
            return blob, self._read_header(blob, wanted, deadline)
        except BaseException:
            blob.close()
            raise

    def _count_load(self, header: Header, load: LoadResult) -> None:
        share = load.rows / (header.num_tokens * len(header.layers))  # of the record, and so of what it took to compute
        prefill_seconds = share * header.prefill_ms / 1e3
        with self._lock:
            self.counters.loads[load.result] += 1
            self.counters.whole_loads[load.result] += load.whole
            self.counters.bytes_read += load.size
            self.counters.rows_read += load.rows
            self.counters.load_seconds += load.seconds
            if load.result == "ok":
                self.counters.load_times.add(load.seconds)
                self.counters.first_times.add(load.first)
                self.counters.saved_seconds += max(0.0, prefill_seconds - load.seconds)
                self.counters.lost_seconds += max(0.0, load.seconds - prefill_seconds)

    def promote(self, take: Promote, record: ChunkRecord) -> None:
        taken = bool(take(record))
        with self._lock:
            self.counters.promotions[taken] += 1

    def _read_header(self, blob: Blob, wanted: ChunkIdentity, deadline: float) -> Header:
        size = blob.size
        with blob.read(0, min(size, FIRST_READ), deadline) as data:
            length = header_length(data, size)
            first = bytes(data)
        if length > len(first):
            with blob.read(0, length, deadline) as data:
                first = bytes(data)
        header = decode_header(memoryview(first), size, wanted.key)
        check_identity(header, wanted)
        if header.expires <= time.time():
            raise TierError("expired")
        if header.layers != self._layers or header.dtype != self._dtype or header.codec != self._codec:
            raise TierError("layout", "another model's shapes")
        return header

    def _retract(self, key: ChunkKey, reason: MissReason, deadline: float) -> None:
        """Take away what is wrong for good or has expired: the next lookup misses at once, and it can be written anew."""
        if reason != "expired" and reason not in DAMAGED:
            return
        try:
            with contained(self.name):
                if reason == "expired":
                    self.blobs.delete([key], deadline)
                    return
                with self._lock:
                    self.counters.damaged[reason] += 1
                self.blobs.discard(key, reason)
        except TierError:
            with self._lock:
                self.counters.discards_failed += 1

    def missed(self, reason: MissReason, tokens: int) -> Miss:
        """Counted."""
        with self._lock:
            self.counters.opens += 1
            self.counters.misses[reason] += 1
            self.counters.missed_tokens += tokens
        return Miss(reason, self.name)


def _close_late(future: Future[OpenRecord | Miss]) -> None:
    """An open that came too late: nobody will close its descriptor but this."""
    if not future.cancelled() and future.exception() is None and isinstance(result := future.result(), OpenRecord):
        result.close()
