"""Records in Redis or Valkey: one string value each, with a time to live.

A server that evicts should run with a ``volatile-*`` policy: records carry a time to live and epochs don't, so only records
make room. Redis can't hold on to one version of a value between two reads; keys are content addresses and rows are checked
above, so a replaced value is harmless and a vanished one is a miss.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

from kvweave.core.keys import ChunkKey
from kvweave.errors import MissingExtra
from kvweave.store.base import BlobInfo, MissReason, PutHints, Rejected, TierError
from kvweave.store.memory_blobs import BATCH, erase_listed

LARGEST = 512 * 2**20
"""Bytes of the longest string that Redis keeps."""
_FIRST = 16 * 1024
"""Bytes fetched on opening: the whole header of a usual record."""
_PIECE = 256 * 1024
"""Bytes asked for at once: redis-py reads one reply of 1 MiB about three times slower than four of this length."""
_RAISE = """
local epoch = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(ARGV[1]) > epoch then redis.call('SET', KEYS[1], ARGV[1]) end
"""


class RedisBlobs:
    """``url`` is what redis-py takes (redis:// or rediss://). ``ttl`` [s] counts from the write.

    ``timeout`` [s] is how long the server may be silent, also while connecting; a call as a whole ends by its deadline, or
    at most one time-out later where it has to connect first. ``options`` go to redis-py's connections.
    """

    name = "redis"
    min_read = 256 * 1024

    def __init__(
        self, url: str, *, ttl: float = 7 * 86400.0, timeout: float = 1.0, connections: int = 8, **options: Any
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingExtra("redis", "redis", "A Redis tier") from None
        self._errors = redis.exceptions
        self._ttl_ms = max(1, round(1000 * ttl))
        self._timeout = timeout
        self._limits = _Limits()
        base = redis.SSLConnection if url.startswith("rediss:") else redis.Connection
        pool = redis.ConnectionPool.from_url(
            url,
            connection_class=_timed(base, self._limits, timeout),
            max_connections=connections,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),  # Guarded does that, within the deadline
            health_check_interval=0,
            protocol=2,
            **options,
        )
        self._free = threading.BoundedSemaphore(connections)
        self._redis = redis.Redis(connection_pool=pool)

    def open(self, key: ChunkKey, deadline: float) -> _RedisBlob | None:
        name = _name(key)
        with self._talk(deadline), self._redis.pipeline(transaction=False) as pipe:
            pipe.strlen(name)
            pipe.getrange(name, 0, _FIRST - 1)
            size, first = pipe.execute()
        if not size:
            return None
        return _RedisBlob(self, name, size, memoryview(first))

    def contains(self, key: ChunkKey, deadline: float) -> bool:
        with self._talk(deadline):
            return bool(self._redis.strlen(_name(key)))

    def was_evicted(self, key: ChunkKey) -> bool:
        """Whoever makes room there doesn't tell."""
        return False

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        if len(value) > LARGEST:
            raise Rejected("no_room")
        epoch_name = _epoch_name(key.scope)
        with self._talk(deadline), self._redis.pipeline(transaction=True) as pipe:
            # Watching ties the write to the epoch: one that is raised meanwhile makes it fail.
            pipe.watch(epoch_name)
            if int(pipe.get(epoch_name) or 0) > hints.epoch:
                raise Rejected("stale")
            pipe.multi()
            life = min(self._ttl_ms, max(1, round(1000 * (min(hints.expires, 2**33) - time.time()))))
            pipe.set(_name(key), value, px=life, nx=True)  # never under a reader of another writer's
            try:
                pipe.execute()
            except self._errors.WatchError:
                raise Rejected("stale") from None

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        self.delete([key], time.monotonic() + self._timeout)

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        names = map(_name, keys)
        count = 0
        while batch := list(islice(names, BATCH)):
            with self._talk(deadline):
                count += int(self._redis.unlink(*batch))
        return count

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        """A value that comes or goes meanwhile may be missed; none is listed twice by intent, but Redis may repeat one."""
        pattern = "kvw1:*:*:*" if scope is None else f"kvw1:*:{scope.hex()}:*"
        cursor = 0
        while True:
            with self._talk(math.inf), self._redis.pipeline(transaction=False) as pipe:
                cursor, names = self._redis.scan(cursor, match=pattern, count=BATCH)
                found = [(name, key) for name in names if (key := _key(name))]
                for name, _ in found:
                    pipe.strlen(name)
                sizes = pipe.execute()
            yield from (BlobInfo(key, size) for (_, key), size in zip(found, sizes, strict=True) if size)
            if not cursor:
                return

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        return erase_listed(self, scope, deadline)

    def epoch(self, scope: bytes, deadline: float) -> int:
        with self._talk(deadline):
            return int(self._redis.get(_epoch_name(scope)) or 0)

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        with self._talk(deadline):
            self._redis.eval(_RAISE, 1, _epoch_name(scope), epoch)

    def ping(self, deadline: float) -> None:
        """Whether the server answers and knows us; raises ``TierError``."""
        with self._talk(deadline):
            self._redis.strlen("kvw1:ping")

    def close(self) -> None:
        self._redis.close()
        self._redis.connection_pool.disconnect()

    def read(self, name: str, offset: int, length: int, deadline: float) -> memoryview:
        """Exactly these bytes of a value; raises ``TierError``."""
        end = offset + length
        with self._talk(deadline), self._redis.pipeline(transaction=False) as pipe:
            for at in range(offset, end, _PIECE):
                pipe.getrange(name, at, min(at + _PIECE, end) - 1)
            data = b"".join(pipe.execute())
        if len(data) != length:
            raise TierError("short" if data else "evicted", f"{len(data)} of {length} bytes")
        return memoryview(data)

    @contextmanager
    def _talk(self, deadline: float) -> Iterator[None]:
        """Use of one connection until ``deadline``; the library's errors become ``TierError`` or ``Rejected``."""
        wait = deadline - time.monotonic()
        if wait <= 0 or not self._free.acquire(timeout=min(wait, self._timeout)):
            raise TierError("deadline" if wait < self._timeout else "busy", "no free connection")
        self._limits.deadline = deadline
        try:
            yield
        except self._errors.OutOfMemoryError:
            raise Rejected("no_room") from None
        except (TimeoutError, self._errors.TimeoutError) as error:
            raise TierError("deadline", str(error)) from None
        except (self._errors.RedisError, OSError) as error:
            # A value over the server's proto-max-bulk-len, which may be less than LARGEST.
            if "invalid bulk length" in str(error) or "maximum allowed size" in str(error):
                raise Rejected("no_room") from None
            raise TierError("io", f"{type(error).__name__}: {error}") from None
        finally:
            self._limits.deadline = math.inf
            self._free.release()


class _RedisBlob:
    def __init__(self, blobs: RedisBlobs, name: str, size: int, first: memoryview) -> None:
        self._blobs = blobs
        self._name = name
        self._first = first
        self.size = size

    def read(self, offset: int, length: int, deadline: float) -> AbstractContextManager[memoryview]:
        length = max(0, min(length, self.size - offset))
        if not length or offset + length <= len(self._first):
            return nullcontext(self._first[offset : offset + length])
        return nullcontext(self._blobs.read(self._name, offset, length, deadline))

    def close(self) -> None:
        """Nothing is held."""


class _Limits(threading.local):
    """When the call that this thread is making has to be over."""

    deadline = math.inf


class _TimedSocket:
    """A socket whose calls end by the deadline, however slowly bytes trickle in; each waits ``silence`` [s] at most."""

    def __init__(self, sock: Any, limits: _Limits, silence: float) -> None:
        self._sock = sock
        self._limits = limits
        self._silence = silence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv(self, *args: Any) -> bytes:
        return self._timed(self._sock.recv, self._silence, *args)

    def recv_into(self, *args: Any) -> int:
        return self._timed(self._sock.recv_into, self._silence, *args)

    def sendall(self, *args: Any) -> None:
        # The socket's time-out is for all of the data, and a large value takes its time.
        self._timed(self._sock.sendall, math.inf, *args)

    def _timed(self, work: Callable[..., Any], longest: float, *args: Any) -> Any:
        if self._sock.gettimeout() == 0:
            return work(*args)  # only a look at whether there is something
        left = min(longest, self._limits.deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(None if left == math.inf else left)
        return work(*args)


def _timed(base: Any, limits: _Limits, silence: float) -> Any:
    """``base``, a connection class of redis-py, with sockets that keep to the deadline of the thread that uses them."""

    class Timed(base):
        def _connect(self) -> _TimedSocket:
            return _TimedSocket(super()._connect(), limits, silence)

    return Timed


def _name(key: ChunkKey) -> str:
    return f"kvw1:{key.model.hex()}:{key.scope.hex()}:{key.content.hex()}"


def _epoch_name(scope: bytes) -> str:
    return f"kvw1:epoch:{scope.hex()}"


def _key(name: Any) -> ChunkKey | None:
    """None: not a record of ours."""
    try:
        _, model, scope, content = name.decode().split(":")
        return ChunkKey(bytes.fromhex(model), bytes.fromhex(scope), bytes.fromhex(content))
    except ValueError:
        return None
