"""Reads of one record: which bytes hold the wanted rows, and their way into tensors, layer by layer, on I/O threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvweave.errors import LoadFailed
from kvweave.store.base import DAMAGED, Blob, ChunkRecord, MissReason, TierError, contained
from kvweave.store.codec import Rows, unpack
from kvweave.store.io_pool import IOPool, Staging
from kvweave.store.record import Header, check_rows

_GAP = 2
"""Groups of rows that aren't wanted but read all the same, because a second read would cost more."""

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Extents:
    """Where the wanted rows of every section lie: runs of whole groups, and where each token is among the rows read."""

    runs: tuple[tuple[int, int], ...]
    """[first row, last row + 1) in stored order."""
    take: NDArray[np.int64]
    """[tokens] index into the rows of all runs, one behind the other."""

    @classmethod
    def of(cls, header: Header, tokens: NDArray[np.int64]) -> Extents:
        stored = np.empty(header.num_tokens, np.int64)
        stored[header.perm] = np.arange(header.num_tokens)
        rows = stored[tokens]
        groups = np.unique(rows // header.group)
        breaks = np.flatnonzero(np.diff(groups) > _GAP) + 1
        runs, base, at = [], np.empty(len(groups), np.int64), 0
        for part in np.split(np.arange(len(groups)), breaks):
            first = int(groups[part[0]]) * header.group
            last = min((int(groups[part[-1]]) + 1) * header.group, header.num_tokens)
            base[part] = at - first  # a row's index is its stored place plus this
            runs.append((first, last))
            at += last - first
        take = rows + base[np.searchsorted(groups, rows // header.group)]
        return cls(tuple(runs), take)

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True)
class Unit:
    """Layers [start, stop) that are read together, and the bytes that takes."""

    start: int
    stop: int
    size: int
    offset: int | None = None
    """Where they start, if it is one read whatever lies between; None: the runs of each layer."""


def make_units(header: Header, extents: Extents, layers: range, min_read: int, least_job: int) -> list[Unit]:
    """One unit a layer, or as many layers as make a job worth while."""
    units: list[Unit] = []
    start, size = layers.start, 0
    for layer in layers:
        size += extents.rows * header.row_bytes(layer)
        if size >= max(min_read, least_job) or layer + 1 == layers.stop:
            units.append(_unit(header, extents, start, layer + 1, size, min_read))
            start, size = layer + 1, 0
    return units


def _unit(header: Header, extents: Extents, start: int, stop: int, size: int, min_read: int) -> Unit:
    """One read of everything between the first and the last wanted byte, if a layer's own are too few for the medium."""
    if stop - start == 1 or size >= min_read * (stop - start):
        return Unit(start, stop, size)
    first = header.offsets[start] + extents.runs[0][0] * header.row_bytes(start)
    last = header.offsets[stop - 1] + extents.runs[-1][1] * header.row_bytes(stop - 1)
    return Unit(start, stop, last - first, first)


@dataclass(frozen=True)
class Loading:
    """What all loads of a tier share."""

    pool: IOPool
    staging: Staging
    least_job: int
    """Bytes that make a job of its own worth while."""


class SharedBlob:
    """A blob that several threads read; it is closed when it was closed *and* the last of them is through.

    Without that a descriptor could be reused for another file under a thread that still reads.
    """

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._blob.size

    @contextmanager
    def read(self, offset: int, length: int, deadline: float) -> Iterator[memoryview]:
        with self._lock:
            if self._closed:
                raise TierError("deadline", "nobody waits any more")
            self._users += 1
        try:
            with self._blob.read(offset, length, deadline) as data:
                yield data
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed and self._users == 0
            if last:
                self._blob.close()

    def close(self) -> None:
        with self._lock:
            unused = not self._closed and self._users == 0
            self._closed = True
        if unused:
            self._blob.close()


@dataclass(frozen=True)
class LoadResult:
    """How a load went."""

    result: str
    """ok, dropped, or the reason of its failure."""
    whole: bool
    """All rows of all layers were wanted."""
    rows: int = 0
    """Rows read, those of every layer."""
    size: int = 0
    """Bytes read."""
    seconds: float = 0.0
    """Added up over I/O threads."""
    first: float = 0.0
    """Seconds from its begin until the first of its reads was done."""


@dataclass(frozen=True)
class Source:
    """An open record as its reader sees it."""

    tier: str
    header: Header
    blob: Blob
    min_read: int
    damaged: Callable[[MissReason], None]
    """Told, on an I/O thread, that the bytes are wrong for good."""
    finished: Callable[[LoadResult], None]
    """Told once of every load."""
    promote: Callable[[ChunkRecord], object] | None = None
    """Takes the record once all of it was read."""
    promote_later: Callable[[Mapping[int, KV]], None] | None = None
    """Told that part of the record was of use, and which of its last layers were read in full."""


class RecordReader:
    """A ``LayerReader`` over an open record. Used by one thread; the reads themselves run on the pool's.

    Layers are read ahead as far as staging has room; the layer that is asked for is read in any case. A read that isn't
    there at the deadline is a ``LoadFailed``, whatever it is doing.
    """

    def __init__(
        self, source: Source, tokens: Tensor, first_layer: int, ticket: int, deadline: float, loading: Loading
    ) -> None:
        header = source.header
        self.tier = source.tier
        self.bytes_read = 0
        self.load_seconds = 0.0
        self._rows_read = 0
        self._begun, self._first = time.perf_counter(), 0.0
        self._source, self._loading, self._ticket = source, loading, ticket
        self._deadline = deadline
        self._timeout = deadline - time.monotonic()
        self._extents = Extents.of(header, tokens.numpy())
        layers = range(first_layer, len(header.layers))
        self._units = make_units(header, self._extents, layers, source.min_read, loading.least_job)
        self._next = 0
        self._reads: dict[int, Future[dict[int, KV]]] = {}
        self._arrived: dict[int, KV] = {}
        self._reserved: dict[int, int] = {}
        all_rows = tokens.numel() == header.num_tokens
        self._whole = first_layer == 0 and all_rows
        self._kept: dict[int, KV] | None = {} if source.promote is not None and all_rows else None
        """Layers for host memory."""
        self._finished = False
        self._lock = threading.Lock()  # of what is counted
        self._ahead()

    @property
    def jobs(self) -> int:
        return len(self._units)

    @property
    def arrived(self) -> bool:
        """Also true if the rest isn't on its way (staging is full: it is read when it is asked for) or too late."""
        self._ahead()
        return all(read.done() for read in self._reads.values()) or time.monotonic() > self._deadline

    def layer(self, layer: int) -> KV:
        if layer not in self._arrived:
            self._arrived |= self._wait(self._unit_of(layer))
        kv = self._arrived.pop(layer)
        if self._kept is not None:
            self._kept[layer] = kv
        self._ahead()
        if layer + 1 == len(self._source.header.layers):
            self._finish("ok")
        return kv

    def close(self) -> None:
        for read in self._reads.values():
            read.cancel()
        for size in self._reserved.values():
            self._loading.staging.release(size)
        self._reserved.clear()
        self._reads.clear()
        self._arrived.clear()
        self._next = len(self._units)
        self._finish("dropped")

    def _unit_of(self, layer: int) -> int:
        return next(i for i, unit in enumerate(self._units) if unit.start <= layer < unit.stop)

    def _ahead(self) -> None:
        """Start the reads that staging has room for, in order."""
        while self._next < len(self._units) and self._loading.staging.try_reserve(self._units[self._next].size):
            self._start(self._next)

    def _start(self, number: int) -> None:
        unit = self._units[number]
        self._reserved[number] = unit.size
        self._next = max(self._next, number + 1)
        self._reads[number] = self._loading.pool.submit((self._ticket, unit.start), lambda: self._read(unit))

    def _wait(self, number: int) -> dict[int, KV]:
        if number not in self._reads:  # staging was full until now, which isn't the medium's fault: its time begins here
            self._deadline = time.monotonic() + self._timeout
            self._loading.staging.force(self._units[number].size)
            self._start(number)
        try:
            return self._reads[number].result(timeout=self._left())
        except TierError as error:
            self._finish(error.reason)
            raise LoadFailed(error.reason, self.tier) from error
        except (TimeoutError, CancelledError):
            self._loading.pool.give_up(self._reads[number])
            self._finish("deadline")
            raise LoadFailed("deadline", self.tier) from None
        finally:
            self._reads.pop(number).cancel()
            self._loading.staging.release(self._reserved.pop(number))

    def _left(self) -> float | None:
        """Seconds until the deadline; None if there is none."""
        return None if math.isinf(self._deadline) else max(0.0, self._deadline - time.monotonic())

    def _read(self, unit: Unit) -> dict[int, KV]:
        """On an I/O thread: read, check, unpack."""
        start = time.perf_counter()
        try:
            if time.monotonic() > self._deadline:
                raise TierError("deadline", "not begun in time")
            with contained(self.tier):
                return read_unit(self._source, unit, self._extents, self._deadline, copy=self._kept is not None)
        except TierError as error:
            if error.reason in DAMAGED:
                self._source.damaged(error.reason)
            raise
        finally:
            end = time.perf_counter()
            with self._lock:
                self.load_seconds += end - start
                self.bytes_read += unit.size
                self._rows_read += self._extents.rows * (unit.stop - unit.start)
                self._first = self._first or end - self._begun

    def _finish(self, result: str) -> None:
        """The first result counts."""
        if self._finished:
            return
        self._finished = True
        with self._lock:
            load = LoadResult(result, self._whole, self._rows_read, self.bytes_read, self.load_seconds, self._first)
        self._source.finished(load)
        if result == "ok":
            self._promote(self._kept or {})
        self._kept = None

    def _promote(self, kept: dict[int, KV]) -> None:
        """What was read in full moves up; of the rest, what is missing is read when there is time."""
        source, header = self._source, self._source.header
        if source.promote is not None and len(kept) == len(header.layers):
            keys, values = (tuple(kept[i][j] for i in range(len(kept))) for j in (0, 1))
            source.promote(ChunkRecord(header.identity, keys, values, header.prefill_ms, header.expires))
        elif source.promote_later is not None:
            source.promote_later(kept)


def read_unit(source: Source, unit: Unit, extents: Extents, deadline: float, *, copy: bool = True) -> dict[int, KV]:
    """The wanted rows of a unit's layers. Raises ``TierError``."""
    header, layers, start = source.header, range(unit.start, unit.stop), unit.offset
    if start is None:
        return {layer: _read_layer(source, layer, extents, deadline, copy) for layer in layers}
    with source.blob.read(start, unit.size, deadline) as data:
        if len(data) < unit.size:
            raise TierError("short")
        return {layer: _layer_in(header, layer, extents, data, header.offsets[layer] - start, copy) for layer in layers}


def _read_layer(source: Source, layer: int, extents: Extents, deadline: float, copy: bool) -> KV:
    header, blob = source.header, source.blob
    parts: list[Rows] = []
    width = header.row_bytes(layer)
    for run in extents.runs:
        start, size = header.offsets[layer] + run[0] * width, (run[1] - run[0]) * width
        with blob.read(start, size, deadline) as data:
            if len(data) < size:
                raise TierError("short")
            if len(extents.runs) == 1:
                return _layer_in(header, layer, extents, data, -run[0] * width, copy)
            parts.append(_rows(header, layer, run, data, -run[0] * width).copy())
    return _unpack(header, layer, parts, extents, copy)


def _layer_in(header: Header, layer: int, extents: Extents, data: memoryview, section: int, copy: bool) -> KV:
    parts = [_rows(header, layer, run, data, section) for run in extents.runs]
    return _unpack(header, layer, parts, extents, copy)


def _rows(header: Header, layer: int, run: tuple[int, int], data: memoryview, section: int) -> Rows:
    """Checked rows of one run; ``section`` is where the layer's section starts in ``data`` (may be before it)."""
    width = header.row_bytes(layer)
    count = run[1] - run[0]
    rows = np.frombuffer(data, np.uint8, count * width, section + run[0] * width).reshape(count, width)
    check_rows(header, layer, run[0], rows)
    return rows


def _unpack(header: Header, layer: int, parts: list[Rows], extents: Extents, copy: bool) -> KV:
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return unpack(rows, extents.take, header.layers[layer], header.codec, header.dtype, copy=copy)
