"""Record files as administration reads them: past every counter, so that looking at a record isn't a use of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvweave.core.keys import ChunkKey
from kvweave.store.base import MissReason, TierError
from kvweave.store.record import FIRST_READ, Header, check_rows, decode_header, header_length

_PIECE = 8 * 2**20  # bytes read and checked at once
Read = Callable[[int, int], bytes | memoryview]
"""(offset, length) -> bytes, fewer where the record ends."""


@dataclass(frozen=True)
class Damage:
    """A record that failed its checks. ``io``: it couldn't be read, which says nothing of its bytes."""

    key: ChunkKey
    reason: MissReason
    detail: str


@contextmanager
def open_file(path: str) -> Iterator[tuple[Read, int]]:
    """A record's file and its size. Raises ``FileNotFoundError`` if it is gone, else ``TierError``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TierError("io", error.strerror or str(error)) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise TierError("io", "not a regular file")

        def read(offset: int, length: int) -> bytes:
            return _read(descriptor, offset, length)

        yield read, found.st_size
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # what requests need is to stay in the page cache
    finally:
        os.close(descriptor)


def check_file(path: str, key: ChunkKey, *, full: bool) -> Header:
    """The header of a record's file, checked; with ``full`` all its rows too.

    Raises ``FileNotFoundError`` if it is gone, else ``TierError``.
    """
    with open_file(path) as (read, size):
        header = read_header(read, size, key)
        if full:
            check_content(header, read)
        return header


def read_header(read: Read, size: int, key: ChunkKey) -> Header:
    """Raises ``TierError``."""
    first = memoryview(read(0, min(size, FIRST_READ)))
    length = header_length(first, size)
    return decode_header(first if length <= len(first) else memoryview(read(0, length)), size, key)


def check_content(header: Header, read: Read) -> None:
    """Every row against its digest. Raises ``TierError``."""
    for layer in range(len(header.layers)):
        width = header.row_bytes(layer)
        step = max(1, _PIECE // (header.group * width)) * header.group
        for first in range(0, header.num_tokens, step):
            count = min(step, header.num_tokens - first)
            data = read(header.offsets[layer] + first * width, count * width)
            if len(data) < count * width:
                raise TierError("short", f"layer {layer}")
            check_rows(header, layer, first, np.frombuffer(data, np.uint8).reshape(count, width))


def _read(descriptor: int, offset: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0:
        try:
            part = os.pread(descriptor, length, offset)
        except OSError as error:
            raise TierError("io", error.strerror or str(error)) from error
        if not part:
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
