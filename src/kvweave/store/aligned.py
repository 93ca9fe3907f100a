"""Bytes in and out of one file: whole pages, into memory that starts at a page border, as O_DIRECT wants them.

O_DIRECT goes past the page cache, so that a store larger than memory doesn't push everything else out of it. Whether a file
system takes it is found out once per store (``direct_works``); without it the same code reads and writes through the cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from kvweave.store.base import TierError

PAGE = 4096
CHUNK = 8 * 2**20
"""Bytes a system call: between two calls the deadline is looked at."""
DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag, or 0 where the system has none."""
_SMALLEST = 64 * 1024


class BufferPool:
    """Page-aligned memory for reads. Thread-safe. Keeps at most ``keep`` free bytes for the next ones."""

    def __init__(self, keep: int = 256 * 2**20) -> None:
        self._keep = keep
        self._lock = threading.RLock()  # memory may come back in a garbage collection on the very thread that holds it
        self._free: dict[int, list[mmap.mmap]] = {}
        self._kept = 0

    def lend(self, length: int) -> memoryview:
        """Memory of at least ``length`` bytes. It comes back by itself when nothing refers to it any more, arrays and
        tensors made of it included: whoever keeps a view never sees another record's bytes. Raises
        ``TierError("no_memory")``.
        """
        buffer = self._take(max(_SMALLEST, 1 << (length - 1).bit_length()))
        array = np.frombuffer(buffer, np.uint8)
        weakref.finalize(array, self._give, buffer).atexit = False
        return memoryview(array.data)

    @property
    def kept(self) -> int:
        """Free bytes that wait for the next read."""
        return self._kept

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            if self._free.get(size):
                self._kept -= size
                return self._free[size].pop()
        try:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError) as error:
            raise TierError("no_memory", str(error)) from None

    def _give(self, buffer: mmap.mmap) -> None:
        with self._lock:
            if self._kept + len(buffer) <= self._keep:
                self._free.setdefault(len(buffer), []).append(buffer)
                self._kept += len(buffer)


class FileBlob:
    """One file, open for reading: a ``Blob``. Its descriptor keeps the bytes readable when the file is removed or replaced.

    ``measured(bytes, seconds)`` is told of every read. Not to be closed while another thread reads (``SharedBlob`` sees to
    that); reads after ``close`` raise ``ValueError``.
    """

    def __init__(
        self, descriptor: int, size: int, direct: bool, pool: BufferPool, measured: Callable[[int, float], None]
    ) -> None:
        self._descriptor = descriptor
        self._size = size
        self._direct = direct
        self._pool = pool
        self._measured = measured

    @property
    def size(self) -> int:
        return self._size

    @contextlib.contextmanager
    def read(self, offset: int, length: int, deadline: float) -> Iterator[memoryview]:
        """See ``Blob.read``. Whole pages are read, whatever is asked for."""
        if offset < 0 or length < 0:
            raise ValueError(f"can't read {length} bytes at {offset}")
        if self._descriptor < 0:
            raise ValueError("read of a closed blob")
        end = min(offset + length, self._size)
        if offset >= end:
            yield memoryview(b"")
            return
        first = offset // PAGE * PAGE
        room = self._pool.lend(_up(end) - first)
        start = time.monotonic()
        got = read_into(self._descriptor, room[: _up(end) - first], first, deadline, self._direct)
        self._measured(got, time.monotonic() - start)
        yield room[offset - first : max(offset - first, min(end - first, got))]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # it is closed all the same, and nothing was written through it
                os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def read_into(descriptor: int, room: memoryview, offset: int, deadline: float, direct: bool) -> int:
    """Fill ``room`` from ``offset`` on; fewer bytes only at the end of the file. Raises ``TierError`` deadline or io."""
    done = 0
    while done < len(room):
        if time.monotonic() > deadline:
            raise TierError("deadline")
        try:
            got = os.preadv(descriptor, [room[done : done + CHUNK]], offset + done)
        except OSError as error:
            raise TierError("io", str(error)) from error
        done += got
        if not got or (direct and got % PAGE):  # O_DIRECT can't go on from inside a page, and needn't: that is the end
            break
    return done


def write_all(descriptor: int, value: memoryview, deadline: float) -> None:
    """Append all of ``value``. Raises ``TierError("deadline")`` and ``OSError``."""
    done = 0
    while done < len(value):
        if time.monotonic() > deadline:
            raise TierError("deadline")
        done += os.write(descriptor, value[done : done + CHUNK])


def is_aligned(value: memoryview) -> bool:
    """True if O_DIRECT can write this memory: whole pages from a page border on."""
    if len(value) % PAGE or not len(value):
        return False
    address: int = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


def direct_works(path: str) -> bool:
    """Whether the file system takes O_DIRECT; tries it with a file of one page at ``path``, which it removes."""
    if not DIRECT:
        return False
    page = mmap.mmap(-1, PAGE)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | DIRECT, 0o600)
    except OSError:  # tmpfs refuses here, others at the first read or write
        return False
    finally:  # already now: the descriptor is enough, and a crash leaves nothing
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    try:
        return os.write(descriptor, page) == PAGE and os.preadv(descriptor, [page], 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _up(length: int) -> int:
    return -(-length // PAGE) * PAGE
