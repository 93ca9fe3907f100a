"""The record format: one chunk's KV as one string of bytes, the same on every medium. Version 1, little-endian.

======================  ===========================================================================================
prologue, 64 bytes      magic, version, lengths of the header and of its JSON part, Unix time from which on it isn't
                        served (0: never), total length, content key, digest of the header
header                  JSON (fingerprint, counts, layers, dtype, codec, order, offsets, ...), then tables: token ids
                        u32[n], anchor ids u32[a], perm u32[n] (stored row -> token), digests 16 B [layers, groups]
sections                one a layer, ascending, each at a multiple of 4,096; rows in ``perm`` order
======================  ===========================================================================================

Rows lie by importance (``store.ranking``), so the rows that a technique doesn't recompute lie together in every
section: one contiguous read a layer for any recompute ratio, rounded up to groups of 32 rows, the unit that is
checked. Rows carry XXH3-128 digests (BLAKE3 took longer than the reads themselves on two cores: docs/log.md), the
header, and with it those digests, a BLAKE3-128. Nothing in a header is trusted before its digest was checked, no
length before it was compared with the size of the value.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from kvweave.core.keys import ChunkIdentity, ChunkKey, ModelFingerprint
from kvweave.store.base import ChunkRecord, TierError
from kvweave.store.codec import CODECS, DTYPES, CodecName, LayerRows, Rows, dtype_name, pack
from kvweave.store.ranking import Ranking

MAGIC = b"KVWEAVE\x01"
VERSION = 1
GROUP = 32
PAGE = 4096
FIRST_READ = 16 * 1024
"""Bytes that hold the whole header of a usual record."""
LARGEST_HEADER = 64 * 2**20
LARGEST_TEXT = 2**20
"""Bytes of JSON: parsed, it takes many times its length in memory."""
_PROLOGUE = struct.Struct("<8sIIIIQ16s16s")
PROLOGUE = _PROLOGUE.size
_DIGEST = 16
SCOPE_BYTES = 8
_NONSENSE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What parsing a header with a right digest raises when it makes no sense."""


@dataclass(frozen=True)
class Header:
    """What a record says of itself, checked for consistency."""

    identity: ChunkIdentity
    layers: tuple[LayerRows, ...]
    dtype: torch.dtype
    codec: CodecName
    order: str
    group: int
    perm: NDArray[np.int64]
    """[n] stored row -> token."""
    digests: NDArray[np.uint8]
    """[layers, groups, 16]"""
    offsets: tuple[int, ...]
    """Where each layer's section starts."""
    total: int
    expires: float
    """Unix time, in whole seconds; infinity: never."""
    prefill_ms: float
    created: float
    writer: str

    @property
    def num_tokens(self) -> int:
        return len(self.identity.token_ids)

    def row_bytes(self, layer: int) -> int:
        return self.layers[layer].row_bytes(self.codec, self.dtype.itemsize)


class EncodeBuffer:
    """Memory that starts at a page border (what O_DIRECT wants) and is used again: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, size: int) -> memoryview:
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._memory)[:size]

    def abandon(self) -> None:
        """Somebody may still read what was taken: the next one gets other memory."""
        self._memory = None


def encode(
    record: ChunkRecord, ranking: Ranking, codec: CodecName, writer: str, buffer: EncodeBuffer | None = None
) -> memoryview:
    """The record as bytes, in page-aligned memory that is valid until ``buffer`` is used again."""
    identity = record.identity
    n = len(identity.token_ids)
    perm = np.ascontiguousarray(ranking.order(record), dtype=np.int64)
    if not np.array_equal(np.sort(perm), np.arange(n)):
        raise ValueError(f"ranking '{ranking.name}' must return every token of the chunk once")
    layers = [LayerRows(k.shape[0], k.shape[2], v.shape[2]) for k, v in zip(record.keys, record.values, strict=True)]
    dtype = record.keys[0].dtype
    widths = [layer.row_bytes(codec, dtype.itemsize) for layer in layers]
    groups = -(-n // GROUP)
    tables = 4 * (2 * n + len(identity.anchor_ids)) + len(layers) * groups * _DIGEST
    text = json.dumps(_about(record, layers, codec, ranking.name, writer), separators=(",", ":")).encode()
    header = _PROLOGUE.size + len(text) + tables
    starts = np.cumsum([_pages(header), *(_pages(n * width) for width in widths)]).tolist()
    view = (buffer or EncodeBuffer()).take(starts[-1])
    digests: list[bytes] = []
    for layer, (start, stop, width) in enumerate(zip(starts, starts[1:], widths, strict=False)):
        rows = np.frombuffer(view, np.uint8, n * width, start).reshape(n, width)
        pack(record.keys[layer], record.values[layer], codec, perm, rows)
        view[start + n * width : stop] = bytes(stop - start - n * width)  # nothing of an earlier record stays between
        digests += [xxh3_128_digest(rows[at : at + GROUP].data) for at in range(0, n, GROUP)]
    ids = (np.asarray(x, "<u4").tobytes() for x in (identity.token_ids, identity.anchor_ids, perm))
    body = b"".join([text, *ids, *digests])
    expires = 0 if math.isinf(record.expires) else min(max(1, int(record.expires)), 2**32 - 1)
    fixed = (MAGIC, VERSION, header, len(text), expires, starts[-1], identity.key.content)
    digest = _header_digest(_PROLOGUE.pack(*fixed, bytes(_DIGEST)), body)
    view[: starts[0]] = (_PROLOGUE.pack(*fixed, digest) + body).ljust(starts[0], b"\0")
    return view


def _about(record: ChunkRecord, layers: list[LayerRows], codec: CodecName, order: str, writer: str) -> dict[str, Any]:
    identity = record.identity
    return {
        "fingerprint": [list(part) for part in identity.fingerprint.parts],
        "scope": identity.key.scope.hex(),
        "tokens": len(identity.token_ids),
        "anchor": len(identity.anchor_ids),
        "layers": [[s.kv_heads, s.key_dim, s.value_dim] for s in layers],
        "dtype": dtype_name(record.keys[0].dtype),
        "codec": codec,
        "digest": "xxh3-128",
        "order": order,
        "group": GROUP,
        "prefill_ms": round(record.prefill_ms, 3),
        "created": round(time.time(), 3),
        "writer": writer,
    }


def header_length(first: memoryview, size: int) -> int:
    """Length of the header of a value of ``size`` bytes, from its first bytes; raises ``TierError``."""
    return _prologue(first, size)[2]


def expiry(first: bytes) -> float:
    """When a value with these first bytes, ``PROLOGUE`` of them or more, expires; infinity too where they make no sense."""
    if len(first) < PROLOGUE or not first.startswith(MAGIC):
        return math.inf
    return float(_PROLOGUE.unpack_from(first)[4]) or math.inf


def decode_header(data: memoryview, size: int, expected: ChunkKey | None = None) -> Header:
    """Parse and check the header of a value of ``size`` bytes; ``data`` holds it. Raises ``TierError``, nothing else.

    ``expected`` is the key the value was found under; None (a file of unknown origin) takes the key from the header.
    """
    _, _, length, text_length, expires, total, content, digest = _prologue(data, size)
    if len(data) < length:
        raise TierError("short", f"{len(data)} of {length} header bytes")
    fixed = bytes(data[: _PROLOGUE.size - _DIGEST]) + bytes(_DIGEST)
    body = bytes(data[_PROLOGUE.size : length])
    if _header_digest(fixed, body) != digest:
        raise TierError("checksum", "header")
    try:
        header = _parse(body, text_length, total, content, expires or math.inf)
    except _NONSENSE as error:
        raise TierError("layout", str(error)) from None
    if expected is not None and header.identity.key != expected:
        raise TierError("key", f"holds {header.identity.key.name}")
    return header


def check_identity(header: Header, wanted: ChunkIdentity) -> None:
    """Every part that decided the key, field by field; raises ``TierError``."""
    found = header.identity
    if found.fingerprint != wanted.fingerprint:
        raise TierError("fingerprint")
    if found.token_ids != wanted.token_ids or found.anchor_ids != wanted.anchor_ids:
        raise TierError("tokens")


def check_rows(header: Header, layer: int, first_row: int, rows: Rows) -> None:
    """Check the digests of whole groups of rows [m, row_bytes] that start at ``first_row``; raises ``TierError``."""
    group = header.group
    for i, at in enumerate(range(0, len(rows), group), start=first_row // group):
        if xxh3_128_digest(rows[at : at + group].data) != header.digests[layer, i].tobytes():
            raise TierError("checksum", f"layer {layer}, rows from {i * group}")


def _prologue(first: memoryview, size: int) -> tuple[Any, ...]:
    if len(first) < _PROLOGUE.size:
        raise TierError("short", "no prologue")
    fields = _PROLOGUE.unpack(first[: _PROLOGUE.size])
    magic, version, length, text_length, _, total = fields[:6]
    if magic[:7] != MAGIC[:7]:
        raise TierError("layout", "not a record")
    if magic != MAGIC or version != VERSION:
        raise TierError("version", f"version {version}")
    if total != size:
        raise TierError("short", f"{size} of {total} bytes")
    if text_length > LARGEST_TEXT or not _PROLOGUE.size + text_length <= length <= min(size, LARGEST_HEADER):
        raise TierError("layout", "header length")
    return fields


def _parse(body: bytes, text_length: int, total: int, content: bytes, expires: float) -> Header:
    about = json.loads(body[:text_length])
    n, anchor, group = int(about["tokens"]), int(about["anchor"]), int(about["group"])
    layers = tuple(LayerRows(*(int(x) for x in layer)) for layer in about["layers"])
    codec, dtype = about["codec"], DTYPES[about["dtype"]]
    if codec not in CODECS or about["digest"] != "xxh3-128":
        raise ValueError("codec or digest unknown")
    if n < 1 or group < 1 or anchor < 0 or not layers:
        raise ValueError("counts")
    if any(s.numbers < 1 or min(s.kv_heads, s.key_dim, s.value_dim) < 0 for s in layers):
        raise ValueError("shapes")
    groups = -(-n // group)
    sizes = [4 * n, 4 * anchor, 4 * n, len(layers) * groups * _DIGEST]
    if len(body) != text_length + sum(sizes):
        raise ValueError("tables")
    at = np.cumsum([text_length, *sizes])
    tokens, anchors, perm = (np.frombuffer(body[a:b], "<u4") for a, b in pairwise(at[:4]))
    if not np.array_equal(np.sort(perm), np.arange(n)):
        raise ValueError("perm")
    lengths = [_pages(n * s.row_bytes(codec, dtype.itemsize)) for s in layers]
    starts = list(accumulate(lengths, initial=_pages(_PROLOGUE.size + len(body))))  # not numpy's: its sums wrap around
    if starts[-1] != total:
        raise ValueError("total length")
    scope, prefill_ms, created = bytes.fromhex(about["scope"]), float(about["prefill_ms"]), float(about["created"])
    if len(scope) != SCOPE_BYTES or not (math.isfinite(prefill_ms) and math.isfinite(created)):
        raise ValueError("scope or times")
    fingerprint = ModelFingerprint(tuple((str(k), str(v)) for k, v in about["fingerprint"]))
    key = ChunkKey(fingerprint.digest[:8], scope, content)
    return Header(
        identity=ChunkIdentity(key, tuple(tokens.tolist()), tuple(anchors.tolist()), fingerprint),
        layers=layers,
        dtype=dtype,
        codec=codec,
        order=str(about["order"]),
        group=group,
        perm=perm.astype(np.int64),
        digests=np.frombuffer(body[at[3] :], np.uint8).reshape(len(layers), groups, _DIGEST),
        offsets=tuple(starts[:-1]),
        total=total,
        expires=expires,
        prefill_ms=prefill_ms,
        created=created,
        writer=str(about["writer"]),
    )


def _header_digest(prologue: bytes, body: bytes) -> bytes:
    hasher = blake3(prologue)
    hasher.update(body)
    return hasher.digest(length=_DIGEST)


def _pages(length: int) -> int:
    return -(-length // PAGE) * PAGE
