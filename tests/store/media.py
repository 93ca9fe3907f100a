"""Media that misbehave, or that note what is asked of them, for tests of whatever lies on top."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from kvweave.core.keys import ChunkKey
from kvweave.store.base import Blob, BlobInfo, Blobs, MissReason, PutHints, TierError

Fault = MissReason | Literal["flip", "cut"] | float | None
"""A reason to fail with; ``flip`` a bit or ``cut`` the end of what a read returns; seconds to wait; nothing."""


def faults(*schedule: Fault) -> Callable[[str], Fault]:
    """These faults for the first calls, one each; none after that."""
    lock, left = threading.Lock(), iter(schedule)

    def choose(operation: str) -> Fault:
        with lock:
            return next(left, None)

    return choose


def random_faults(
    seed: int, rate: float, kinds: tuple[Fault, ...] = ("io", "deadline", "flip", "cut", 0.001)
) -> Callable[[str], Fault]:
    """Any of ``kinds`` at a share of ``rate`` of the calls; one seed gives one sequence."""
    lock, rng = threading.Lock(), random.Random(seed)

    def choose(operation: str) -> Fault:
        with lock:
            return rng.choice(kinds) if rng.random() < rate else None

    return choose


def always(fault: Fault, *operations: str) -> Callable[[str], Fault]:
    """``fault`` in every call, or in those of some operations (open, read, put, delete, raise_epoch, ...)."""
    return lambda operation: fault if not operations or operation in operations else None


class FaultyBlobs:
    """``blobs`` with faults; ``choose`` may be replaced while it is in use. A wait past the deadline fails."""

    def __init__(self, blobs: Blobs, choose: Callable[[str], Fault] = lambda operation: None, seed: int = 0) -> None:
        self.blobs = blobs
        self.choose = choose
        self._random = random.Random(seed)

    @property
    def name(self) -> str:
        return self.blobs.name

    @property
    def min_read(self) -> int:
        return self.blobs.min_read

    def before(self, operation: str, deadline: float) -> Fault:
        fault = self.choose(operation)
        if isinstance(fault, int | float):
            left = deadline - time.monotonic()
            time.sleep(max(0.0, min(fault, left)))
            if fault >= left:
                raise TierError("deadline", "injected")
        elif fault not in (None, "flip", "cut"):
            raise TierError(fault, "injected")
        return fault

    def spoil(self, data: memoryview, fault: Fault) -> memoryview:
        if fault == "cut" and data:
            return data[: self._random.randrange(len(data))]
        if fault == "flip" and data:
            copy = bytearray(data)
            copy[self._random.randrange(len(copy))] ^= 1 << self._random.randrange(8)
            return memoryview(copy)
        return data

    def open(self, key: ChunkKey, deadline: float) -> Blob | None:
        self.before("open", deadline)
        blob = self.blobs.open(key, deadline)
        return None if blob is None else _FaultyBlob(self, blob)

    def contains(self, key: ChunkKey, deadline: float) -> bool:
        self.before("contains", deadline)
        return self.blobs.contains(key, deadline)

    def was_evicted(self, key: ChunkKey) -> bool:
        return self.blobs.was_evicted(key)

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        self.blobs.put(key, self.spoil(value, self.before("put", deadline)), hints, deadline)

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        self.before("discard", time.monotonic() + 1.0)
        self.blobs.discard(key, reason)

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        self.before("delete", deadline)
        return self.blobs.delete(keys, deadline)

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        self.before("scan", time.monotonic() + 1.0)
        return self.blobs.scan(scope)

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        self.before("erase", deadline)
        return self.blobs.erase(scope, deadline)

    def epoch(self, scope: bytes, deadline: float) -> int:
        self.before("epoch", deadline)
        return self.blobs.epoch(scope, deadline)

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        self.before("raise_epoch", deadline)
        self.blobs.raise_epoch(scope, epoch, deadline)

    def ping(self, deadline: float) -> None:
        self.before("ping", deadline)
        self.blobs.ping(deadline)

    def close(self) -> None:
        self.blobs.close()


class _FaultyBlob:
    def __init__(self, medium: FaultyBlobs, blob: Blob) -> None:
        self._medium = medium
        self._blob = blob
        self.size = blob.size

    @contextmanager
    def read(self, offset: int, length: int, deadline: float) -> Iterator[memoryview]:
        fault = self._medium.before("read", deadline)
        with self._blob.read(offset, length, deadline) as data:
            yield self._medium.spoil(data, fault)

    def close(self) -> None:
        self._blob.close()


@dataclass(frozen=True)
class Call:
    operation: str
    key: ChunkKey | None = None
    offset: int = 0
    bytes: int = 0
    """Moved: read or written."""


@dataclass
class RecordingBlobs:
    """``blobs``, and what was asked of it, in order; ``opened`` and ``closed`` count values."""

    blobs: Blobs
    calls: list[Call] = field(default_factory=list)
    opened: int = 0
    closed: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.blobs.name

    @property
    def min_read(self) -> int:
        return self.blobs.min_read

    def of(self, operation: str) -> list[Call]:
        with self.lock:
            return [call for call in self.calls if call.operation == operation]

    def bytes(self, operation: str) -> int:
        return sum(call.bytes for call in self.of(operation))

    def note(self, call: Call) -> None:
        with self.lock:
            self.calls.append(call)

    def open(self, key: ChunkKey, deadline: float) -> Blob | None:
        self.note(Call("open", key))
        blob = self.blobs.open(key, deadline)
        if blob is None:
            return None
        with self.lock:
            self.opened += 1
        return _RecordedBlob(self, key, blob)

    def contains(self, key: ChunkKey, deadline: float) -> bool:
        self.note(Call("contains", key))
        return self.blobs.contains(key, deadline)

    def was_evicted(self, key: ChunkKey) -> bool:
        return self.blobs.was_evicted(key)

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        self.note(Call("put", key, 0, len(value)))
        self.blobs.put(key, value, hints, deadline)

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        self.note(Call("discard", key))
        self.blobs.discard(key, reason)

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        listed = list(keys)
        for key in listed:
            self.note(Call("delete", key))
        return self.blobs.delete(listed, deadline)

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        self.note(Call("scan"))
        return self.blobs.scan(scope)

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        self.note(Call("erase"))
        return self.blobs.erase(scope, deadline)

    def epoch(self, scope: bytes, deadline: float) -> int:
        self.note(Call("epoch"))
        return self.blobs.epoch(scope, deadline)

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        self.note(Call("raise_epoch"))
        self.blobs.raise_epoch(scope, epoch, deadline)

    def ping(self, deadline: float) -> None:
        self.note(Call("ping"))
        self.blobs.ping(deadline)

    def close(self) -> None:
        self.note(Call("close"))
        self.blobs.close()


class _RecordedBlob:
    def __init__(self, medium: RecordingBlobs, key: ChunkKey, blob: Blob) -> None:
        self._medium = medium
        self._key = key
        self._blob = blob
        self.size = blob.size

    @contextmanager
    def read(self, offset: int, length: int, deadline: float) -> Iterator[memoryview]:
        with self._blob.read(offset, length, deadline) as data:
            self._medium.note(Call("read", self._key, offset, len(data)))
            yield data

    def close(self) -> None:
        with self._medium.lock:
            self._medium.closed += 1
        self._blob.close()
