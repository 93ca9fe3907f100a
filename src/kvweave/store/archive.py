"""Records in one file: to carry them elsewhere (tar), or to look at one with other tools (safetensors).

An archive is a plain tar of record files named by their keys, behind one small JSON file that tells each tenant's epoch.
Nothing in an archive is trusted: a record is added under the key that it proves by its own bytes, never under a path, and
only after all its digests were checked. Whoever made an archive can still put wrong numbers into it with right digests, so
import only what you would load.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import tarfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvweave.core.keys import ChunkKey
from kvweave.errors import StoreError
from kvweave.store.admin import Step, StoreFolder
from kvweave.store.base import BlobInfo, PutHints, Rejected, TierError
from kvweave.store.checking import Read, check_content, open_file
from kvweave.store.codec import dtype_name, unpack
from kvweave.store.files import SUFFIX
from kvweave.store.record import Header, decode_header
from kvweave.store.selection import parse_key

MANIFEST = "kvweave-export.json"
LARGEST_RECORD = 4 * 2**30
"""Bytes; no chunk comes near it."""
_LARGEST_MANIFEST = 2**20
_NAMED = 20  # skipped members that are named in a report
_WRITE_SECONDS = 60.0
_BROKEN = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, KeyError, TypeError, RecursionError, MemoryError)
"""What tarfile raises for archives that make no sense, or end too early."""


@dataclass
class Exported:
    """``skipped``: records that weren't taken along, by reason; ``gone`` were evicted meanwhile."""

    records: int = 0
    bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


@dataclass
class Imported:
    """``skipped`` by reason: alien (no record's name), link (not a plain file), large, erased or epoch (the tenant's epoch
    here is another), no_room, quota, or what is wrong with the record; ``named`` has the first of them."""

    added: int = 0
    present: int = 0
    """Records that were there already."""
    bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    named: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, name: str, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.named) < _NAMED:
            self.named.append(("".join(c if c.isprintable() else "?" for c in name[:200]), reason))


def export_records(
    folder: StoreFolder, infos: Sequence[BlobInfo], out: Path, *, force: bool = False, step: Step = lambda line: None
) -> Exported:
    """Write records, each checked in full, into a new archive. Raises ``StoreError``."""
    done = Exported()
    epochs = {scope.hex(): folder.epoch(scope) for scope in sorted({info.key.scope for info in infos})}
    with private_output(out, force) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        about = json.dumps({"format": 1, "epochs": epochs}).encode()
        _add(tar, MANIFEST, about, time.time())
        for info in infos:
            try:
                with open_file(folder.path(info.key)) as (read, size):
                    if size > LARGEST_RECORD:
                        raise TierError("layout", "too large for a record")
                    value = memoryview(read(0, size))
                header = decode_header(value, len(value), info.key)
                check_content(header, _slices(value))
            except FileNotFoundError:
                done.skip("gone")
            except TierError as error:
                done.skip(error.reason)
            else:
                _add(tar, f"{info.key.name}{SUFFIX}", value, header.created)
                done.records += 1
                done.bytes += len(value)
            step(info.key.name)
    return done


def import_records(folder: StoreFolder, archive: Path, *, step: Step = lambda line: None) -> Imported:
    """Add the records of an archive that pass every check. Never evicts.

    Raises ``StoreError`` if the archive can't be read or ends too early; what was added before that stays.
    """
    done = Imported()
    try:
        file = open(archive, "rb")  # noqa: SIM115 - closed below; its errors are other ones than those of reading
    except OSError as error:
        raise StoreError(f"The archive {archive} can't be read ({error.strerror or error}). Check its path.") from error
    try:
        with file, folder.explained():
            _Import(folder, file, done, step).run()
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise StoreError(
            f"{archive} is not a whole archive ({reason}). {done.added} records were added before that; export it again."
        ) from error
    return done


class _Import:
    def __init__(self, folder: StoreFolder, file: IO[bytes], done: Imported, step: Step) -> None:
        self._folder, self._file, self._done, self._step = folder, file, done, step
        self._size = os.fstat(file.fileno()).st_size
        self._epochs: dict[str, int] = {}
        blobs = folder.blobs
        blobs.reconciled.wait(_WRITE_SECONDS)
        capacity = blobs.capacity
        self._room = None if capacity is None else capacity - blobs.stats().bytes

    def run(self) -> None:
        at = -1
        with tarfile.open(fileobj=self._file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                if tar.offset <= at:
                    raise tarfile.ReadError("members overlap")
                at = tar.offset
                tar.members.clear()  # type: ignore[attr-defined] # else they are all kept in memory
                self._member(tar, member)
                self._step(member.name)
            self._check_end(tar.offset)

    def _check_end(self, offset: int) -> None:
        """tarfile takes nonsense for the end; a whole archive ends with a block of zeros."""
        self._file.seek(offset)
        if self._file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"it ends, or makes no sense, at byte {offset}")

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name, done = member.name, self._done
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            return done.skip(name, "link")
        if name == MANIFEST and member.size <= _LARGEST_MANIFEST:
            self._epochs = _epochs(self._bytes(tar, member))
            return None
        key = parse_key(name.removesuffix(SUFFIX).removeprefix("v1/")) if name.endswith(SUFFIX) else None
        if key is None:
            return done.skip(name, "alien")
        if member.size > LARGEST_RECORD or member.size > self._size:
            return done.skip(name, "large")
        reason = self._add(tar, member, key)
        return None if reason is None else done.skip(name, reason)

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, key: ChunkKey) -> str | None:
        """Store a member; the reason if it wasn't."""
        blobs, done = self._folder.blobs, self._done
        epoch = self._folder.epoch(key.scope)
        if epoch != self._epochs.get(key.scope.hex(), 0):
            return "erased" if epoch > self._epochs.get(key.scope.hex(), 0) else "epoch"
        if blobs.contains(key):
            done.present += 1
            return None
        if self._room is not None and member.size > self._room:
            return "no_room"
        value = self._bytes(tar, member)
        try:
            header = decode_header(value, len(value), key)
            check_content(header, _slices(value))
        except TierError as error:
            return error.reason
        if header.expires <= time.time():
            return "expired"
        hints = PutHints(header.prefill_ms, header.num_tokens, epoch, header.expires)
        try:
            blobs.put(key, value, hints, time.monotonic() + _WRITE_SECONDS)
        except Rejected as error:
            if error.reason == "read_only":
                raise TierError("io", "the folder is read-only") from error
            return error.reason
        done.added += 1
        done.bytes += len(value)
        self._room = None if self._room is None else self._room - len(value)
        return None

    def _bytes(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> memoryview:
        """A member's bytes, in memory that starts at a page border (what O_DIRECT wants)."""
        source = tar.extractfile(member)
        assert source is not None
        room = memoryview(mmap.mmap(-1, max(1, member.size)))
        got = 0
        while got < member.size:
            count = source.readinto(room[got : min(member.size, got + 2**23)])  # type: ignore[attr-defined]
            if not count:
                raise tarfile.ReadError("it ends within a member")
            got += count
        return room[: member.size]


def _slices(value: memoryview) -> Read:
    return lambda offset, length: value[offset : offset + length]


def _epochs(text: memoryview) -> dict[str, int]:
    about = json.loads(bytes(text))
    if not isinstance(about, dict) or about.get("format") != 1:
        raise ValueError(f"{MANIFEST} is of another format")
    return {str(scope): int(epoch) for scope, epoch in dict(about["epochs"]).items()}


def _add(tar: tarfile.TarFile, name: str, value: bytes | memoryview, created: float) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(value), 0o600, int(created)
    tar.addfile(member, io.BytesIO(value))


# One record for other tools


def export_tensors(folder: StoreFolder, info: BlobInfo, out: Path, *, force: bool = False) -> Header:
    """K and V of one record as safetensors: ``layers.N.keys`` and ``layers.N.values`` [kv_heads, tokens, dim], keys not
    rotated, tokens in the order of the text; ``token_ids`` and ``anchor_ids`` [tokens] int64. Raises ``StoreError``.
    """
    import torch
    from safetensors.torch import save

    try:
        with open_file(folder.path(info.key)) as (read, size):
            value = memoryview(read(0, size))
        header = decode_header(value, len(value), info.key)
        check_content(header, _slices(value))
    except FileNotFoundError:
        raise StoreError(f"Record {info.key.content.hex()} is gone. See what there is with kvweave cache ls.") from None
    except TierError as error:
        raise StoreError(
            f"Record {info.key.content.hex()} is damaged ({error}). Take it away with kvweave cache verify --repair."
        ) from error
    tensors = {"token_ids": torch.tensor(header.identity.token_ids, dtype=torch.int64)}
    tensors["anchor_ids"] = torch.tensor(header.identity.anchor_ids, dtype=torch.int64)
    places = np.argsort(header.perm)  # the stored row of every token
    for layer, spec in enumerate(header.layers):
        width = header.row_bytes(layer)
        rows = np.frombuffer(value, np.uint8, header.num_tokens * width, header.offsets[layer]).reshape(-1, width)
        keys, values = unpack(rows, places, spec, header.codec, header.dtype)
        tensors |= {f"layers.{layer}.keys": keys.contiguous(), f"layers.{layer}.values": values.contiguous()}
    with private_output(out, force) as file:
        file.write(save(tensors, metadata={name: str(value) for name, value in describe(header).items()}))
    return header


def describe(header: Header) -> dict[str, Any]:
    """A header for people and JSON, without its tables."""
    return {
        "key": header.identity.key.name,
        "fingerprint": dict(header.identity.fingerprint.parts),
        "tokens": header.num_tokens,
        "anchor_tokens": len(header.identity.anchor_ids),
        "layers": len(header.layers),
        "shapes": sorted({(s.kv_heads, s.key_dim, s.value_dim) for s in header.layers}),
        "dtype": dtype_name(header.dtype),
        "codec": header.codec,
        "order": header.order,
        "rows_per_digest": header.group,
        "bytes": header.total,
        "header_bytes": header.offsets[0],
        "bytes_per_token": sum(header.row_bytes(layer) for layer in range(len(header.layers))),
        "prefill_ms": header.prefill_ms,
        "created": header.created,
        "expires": None if math.isinf(header.expires) else header.expires,
        "writer": header.writer,
    }


@contextmanager
def private_output(path: Path, force: bool) -> Iterator[IO[bytes]]:
    """A file for its owner alone that appears whole or not at all. Raises ``StoreError``; replaces a file with ``force``."""
    if path.is_dir() or (path.exists() and not force):
        raise StoreError(f"{path} exists already. Give another name, or --force to replace a file.")
    temp = path.parent / f".{path.name[:100]}.{uuid.uuid4().hex}"
    try:
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            os.rename(temp, path)
        except BaseException:
            os.unlink(temp)
            raise
    except OSError as error:
        raise StoreError(f"{path} can't be written ({error.strerror or error}). Check the folder and the disk.") from error
