"""Lossless compression of whole values, for media where bytes are dear.

A compressed value is 24 bytes (magic, u64 length of the plain value, u64 length as stored, little-endian) and one zstd
frame with a checksum. Ranges of a frame can't be read, so ``open`` fetches and decompresses all of it: partial reads save
nothing here. Values that don't shrink are stored as they are; those and values written before compression was switched on
are read as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from kvweave.core.keys import ChunkKey
from kvweave.errors import InvalidOption, MissingExtra
from kvweave.store.base import Blob, BlobInfo, Blobs, MissReason, PutHints, TierError
from kvweave.store.memory_blobs import BytesBlob

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"KVZSTD\x00\x01"
_WORTH = 0.97
"""Share of the plain length below which a value is stored compressed."""
LARGEST = 2 * 2**30
_WINDOW = 2**27
"""Bytes of history that decompressing may need at most; zstd's own default limit."""


class Compressed:
    """``blobs`` with zstd at ``level`` (1 to 19); values of more than ``largest`` plain bytes are never decompressed."""

    def __init__(self, blobs: Blobs, level: int = 1, largest: int = LARGEST) -> None:
        try:
            import zstandard
        except ImportError:
            raise MissingExtra("zstandard", "zstd", "Compression of a remote tier") from None
        if not 1 <= level <= 19:
            raise InvalidOption(f"compression level {level} is outside 1 to 19")
        self._zstd = zstandard
        self._blobs = blobs
        self._level = level
        self._largest = largest

    @property
    def name(self) -> str:
        return self._blobs.name

    @property
    def min_read(self) -> int:
        """As of the medium: values that are stored as they are can be read in parts."""
        return self._blobs.min_read

    def open(self, key: ChunkKey, deadline: float) -> Blob | None:
        blob = self._blobs.open(key, deadline)
        if blob is None:
            return None
        try:
            with blob.read(0, _HEAD.size, deadline) as head:
                plain = self._plain_length(bytes(head), blob.size)
            if plain is None:
                return blob
            with blob.read(_HEAD.size, blob.size - _HEAD.size, deadline) as frame:
                value = self._decompress(frame, plain)
        except BaseException:
            blob.close()
            raise
        blob.close()
        return BytesBlob(value)

    def contains(self, key: ChunkKey, deadline: float) -> bool:
        return self._blobs.contains(key, deadline)

    def was_evicted(self, key: ChunkKey) -> bool:
        return self._blobs.was_evicted(key)

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        # A compressor isn't thread-safe; making one is cheap next to a value.
        frame = self._zstd.ZstdCompressor(level=self._level, write_checksum=True).compress(value)
        if len(value) <= self._largest and _HEAD.size + len(frame) < _WORTH * len(value):
            value = memoryview(_HEAD.pack(_MAGIC, len(value), _HEAD.size + len(frame)) + frame)
        self._blobs.put(key, value, hints, deadline)

    def _plain_length(self, head: bytes, size: int) -> int | None:
        """None: the value isn't compressed."""
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            return None
        _, plain, stored = _HEAD.unpack(head)
        if stored != size:
            raise TierError("short", f"{size} of {stored} bytes")
        if plain > self._largest:
            raise TierError("layout", f"{plain} bytes decompressed, more than {self._largest}")
        return plain

    def _decompress(self, frame: memoryview, plain: int) -> bytearray:
        """Exactly ``plain`` bytes, in a buffer of that size whatever the frame says of itself."""
        decompressor = self._zstd.ZstdDecompressor(max_window_size=_WINDOW)
        try:
            # Only a frame's own word about its length is compared before memory is taken.
            if self._zstd.frame_content_size(frame) != plain:
                raise TierError("checksum", "compressed length")
            value = bytearray(plain)
            with decompressor.stream_reader(frame, closefd=False) as reader:
                filled = reader.readinto(value)
                while 0 < filled < plain and (more := reader.readinto(memoryview(value)[filled:])):
                    filled += more
                # Reading on takes the decompressor to the frame's checksum, which is there: the length as stored was right.
                if filled != plain or reader.read(1):
                    raise TierError("checksum", f"{filled} of {plain} bytes decompressed")
        except self._zstd.ZstdError as error:
            raise TierError("checksum", str(error)) from None
        except MemoryError:
            raise TierError("no_memory", f"{plain} bytes") from None
        return value

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        self._blobs.discard(key, reason)

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        return self._blobs.delete(keys, deadline)

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        """Sizes are those stored."""
        return self._blobs.scan(scope)

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        return self._blobs.erase(scope, deadline)

    def epoch(self, scope: bytes, deadline: float) -> int:
        return self._blobs.epoch(scope, deadline)

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        self._blobs.raise_epoch(scope, epoch, deadline)

    def ping(self, deadline: float) -> None:
        self._blobs.ping(deadline)

    def close(self) -> None:
        self._blobs.close()
