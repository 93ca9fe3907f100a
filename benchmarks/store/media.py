"""Media for the benchmark: a throttle that any medium can stand behind, and a Redis server of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvweave.core.keys import ChunkKey
from kvweave.store.base import Blob, Blobs


class Bucket:
    """One medium's time: a transfer of n bytes takes ``seek + n / rate`` seconds of it, whoever asks. Monotonic clock."""

    def __init__(self, rate: float, seek: float) -> None:
        self.rate, self.seek = rate, seek
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + self.seek + size / self.rate
            wait = self._free_at - now
        time.sleep(wait)


class Throttled:
    """``blobs`` at most as fast as ``rate`` bytes a second, with ``seek`` seconds a read. Everything else passes through."""

    def __init__(self, blobs: Blobs, rate: float, seek: float, name: str) -> None:
        self._blobs = blobs
        self._bucket = Bucket(rate, seek)
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blobs, name)

    def open(self, key: ChunkKey, deadline: float) -> Blob | None:
        blob = self._blobs.open(key, deadline)
        return None if blob is None else _ThrottledBlob(blob, self._bucket)


class _ThrottledBlob:
    def __init__(self, blob: Blob, bucket: Bucket) -> None:
        self._blob, self._bucket = blob, bucket
        self.size = blob.size

    @contextmanager
    def read(self, offset: int, length: int, deadline: float) -> Iterator[memoryview]:
        self._bucket.take(length)
        with self._blob.read(offset, length, deadline) as data:
            yield data

    def close(self) -> None:
        self._blob.close()


@contextmanager
def redis_url() -> Iterator[str | None]:
    """A Redis server without persistence on a free port; None if none is installed."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder, "--bind", "127.0.0.1"]
        server = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()
