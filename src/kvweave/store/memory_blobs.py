"""A medium in memory: the reference for what a ``Blobs`` does, and the one that tests use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

from kvweave.core.keys import ChunkKey
from kvweave.store.base import BlobInfo, Blobs, MissReason, PutHints, Rejected

BATCH = 500


def erase_listed(blobs: Blobs, scope: bytes, deadline: float) -> tuple[int, int]:
    """``Blobs.erase`` for media that know no better: what is listed is removed, page by page."""
    count = size = 0
    listed = blobs.scan(scope)
    while page := list(islice(listed, BATCH)):
        count += blobs.delete([info.key for info in page], deadline)
        size += sum(info.size for info in page)
    return count, size


class BytesBlob:
    """A value that is in memory as a whole; also what a medium without partial reads hands out."""

    def __init__(self, value: bytes | bytearray | memoryview) -> None:
        self._value = memoryview(value).toreadonly()

    @property
    def size(self) -> int:
        return len(self._value)

    def read(self, offset: int, length: int, deadline: float) -> AbstractContextManager[memoryview]:
        return nullcontext(self._value[offset : offset + length])

    def close(self) -> None:
        """Nothing is held."""


class MemoryBlobs:
    """Keeps everything it is given."""

    name = "memory"
    min_read = 1

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[ChunkKey, bytes] = {}
        self._expires: dict[ChunkKey, float] = {}
        self._epochs: dict[bytes, int] = {}

    def open(self, key: ChunkKey, deadline: float) -> BytesBlob | None:
        with self._lock:
            value = self._values.get(key)
        return None if value is None else BytesBlob(value)

    def contains(self, key: ChunkKey, deadline: float) -> bool:
        with self._lock:
            return key in self._values and self._expires[key] > time.time()

    def was_evicted(self, key: ChunkKey) -> bool:
        return False

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        copy = bytes(value)
        with self._lock:
            if self._epochs.get(key.scope, 0) > hints.epoch:
                raise Rejected("stale")
            self._values[key] = copy
            self._expires[key] = hints.expires

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        with self._lock:
            self._values.pop(key, None)

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        listed = list(keys)  # may come from a scan, which needs the lock as well
        with self._lock:
            return sum(self._values.pop(key, None) is not None for key in listed)

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        with self._lock:
            found = [BlobInfo(k, len(v)) for k, v in self._values.items() if scope is None or k.scope == scope]
        yield from found

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        return erase_listed(self, scope, deadline)

    def epoch(self, scope: bytes, deadline: float) -> int:
        with self._lock:
            return self._epochs.get(scope, 0)

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        with self._lock:
            self._epochs[scope] = max(epoch, self._epochs.get(scope, 0))

    def ping(self, deadline: float) -> None:
        """Always there."""

    def close(self) -> None:
        """Nothing is held."""
