"""How fast records go to the disk tier and back, against the disk itself, in turns."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvweave.core.keys import ChunkIdentity, ModelFingerprint, Scope
from kvweave.core.spec import KVLayout
from kvweave.store.base import ChunkRecord, Miss
from kvweave.store.codec import CodecName
from kvweave.store.disk import DiskBlobs
from kvweave.store.host import HostStore
from kvweave.store.tiered import TieredStore, TierOptions

TOKENS = 512
_WRITERS = 2  # threads of the store's write-behind


def make_records(layout: KVLayout, count: int, model: str) -> list[ChunkRecord]:
    """Random KV of chunks of 512 tokens."""
    generator = torch.Generator().manual_seed(0)
    fingerprint, scope = ModelFingerprint.of(content=model), Scope.of("default")
    records = []
    for number in range(count):
        identity = ChunkIdentity.of([number, *range(TOKENS - 1)], [1], fingerprint, scope)
        keys, values = [], []
        for spec in layout.layers:
            keys.append(torch.randn(spec.num_kv_heads, TOKENS, spec.key_dim, generator=generator).to(layout.dtype))
            values.append(torch.randn(spec.num_kv_heads, TOKENS, spec.value_dim, generator=generator).to(layout.dtype))
        records.append(ChunkRecord(identity, tuple(keys), tuple(values)))
    return records


class RawFiles:
    """The same bytes in the same number of files by plain positioned O_DIRECT reads and writes on as many threads."""

    def __init__(self, folder: Path, count: int, size: int, read_size: int, threads: int) -> None:
        self.paths = [folder / f"raw-{i}" for i in range(count)]
        self.size, self.read_size, self.threads = size, read_size, threads
        self.data = mmap.mmap(-1, size)
        self.data[:] = os.urandom(size)

    def write(self) -> None:
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(self._write, self.paths))

    def _write(self, path: Path) -> None:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | _direct(), 0o600)
        try:
            os.pwrite(handle, self.data, 0)
        finally:
            os.close(handle)

    def read(self) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(self._read, self.paths))

    def _read(self, path: Path) -> None:
        handle, buffer = os.open(path, os.O_RDONLY | _direct()), mmap.mmap(-1, self.read_size)
        try:
            for offset in range(0, self.size - self.read_size + 1, self.read_size):
                os.preadv(handle, [buffer], offset)
        finally:
            os.close(handle)


def _direct() -> int:
    return getattr(os, "O_DIRECT", 0)


def write_all(store: TieredStore, records: list[ChunkRecord]) -> None:
    for record in records:
        store.put(record, wait=True)
    store.flush()


def read_all(store: TieredStore, records: list[ChunkRecord]) -> None:
    """Every layer of every record, layer by layer, as a prefill takes them."""
    found = [f for f in store.find([r.identity for r in records]) if not isinstance(f, Miss)]
    if len(found) < len(records):
        raise RuntimeError(f"{len(records) - len(found)} records are missing")
    readers = [f.read(torch.arange(TOKENS), 0, i, 60.0) for i, f in enumerate(found)]
    for layer in range(len(records[0].keys)):
        for reader in readers:
            reader.layer(layer)
    for f in found:
        f.close()


def measure(
    layout: KVLayout, folder: Path, *, count: int, repeat: int, threads: int, codec: CodecName = "raw"
) -> dict[str, Any]:
    """GB/s (10^9 bytes of record a second): medians over ``repeat`` turns of store and raw disk."""
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    size = 0
    disk = DiskBlobs(folder / "store", 8 * 2**30)
    options = TierOptions(codec=codec, threads=threads, staging=64 * 2**20)
    store = TieredStore(HostStore(0), [disk], layout=layout, options=options)  # one for all turns, as in a server
    for turn in range(repeat + 1):
        records = make_records(layout, count, f"{codec}-{turn}")

        def timed(name: str, work: Callable[[], None], keep: bool = turn > 0) -> None:
            start, start_cpu = time.perf_counter(), time.process_time()
            work()
            if keep:
                seconds.setdefault(name, []).append(time.perf_counter() - start)
                cpu.setdefault(name, []).append(time.process_time() - start_cpu)

        timed("write", partial(write_all, store, records))
        size = store.tiers[0].counters.bytes_written // (count * (turn + 1))
        raw = RawFiles(folder, count, size, 4096 * max(1, size // layout.num_layers // 4096), threads)
        timed("raw write", raw.write)
        timed("read", partial(read_all, store, records))
        timed("raw read", raw.read)
        store.remove([r.key for r in records])
        for path in raw.paths:
            path.unlink()
    store.close()
    rate = {name: count * size / median(times) / 1e9 for name, times in seconds.items()}
    return {
        "codec": codec,
        "record_bytes": size,
        "records": count,
        "write_gbs": rate["write"],
        "raw_write_gbs": rate["raw write"],
        "write_ratio": rate["write"] / rate["raw write"],
        "read_gbs": rate["read"],
        "raw_read_gbs": rate["raw read"],
        "read_ratio": rate["read"] / rate["raw read"],
        "cpu_seconds": {name: median(times) for name, times in cpu.items()},
        "wall_seconds": {name: median(times) for name, times in seconds.items()},
    }


def restart(folder: Path, count: int) -> dict[str, float]:
    """Seconds until a store of ``count`` small records serves, with its catalogue and without."""
    from kvweave.core.keys import ChunkKey
    from kvweave.store.base import PutHints

    root = folder / "restart"
    disk = DiskBlobs(root, 2**33)
    value = memoryview(mmap.mmap(-1, 4096))
    keys = [ChunkKey(b"m" * 8, b"s" * 8, i.to_bytes(16, "little")) for i in range(count)]
    for key in keys:
        disk.put(key, value, PutHints(), time.monotonic() + 60)
    disk.close()
    out = {}
    for name in ("with_catalogue", "without_catalogue"):
        if name == "without_catalogue":
            for file in (root / "v1").glob("catalog.sqlite*"):
                file.unlink()
        start = time.perf_counter()
        disk = DiskBlobs(root, 2**33)
        blob = disk.open(keys[count // 2], time.monotonic() + 10)
        if blob is None:
            raise RuntimeError("a record is missing after a restart")
        blob.close()
        out[f"{name}_first_open_s"] = time.perf_counter() - start
        disk.reconciled.wait(60)
        out[f"{name}_counted_s"] = time.perf_counter() - start
        disk.close()
    return out
