"""Records in an S3-compatible object store, through obstore: one object each.

Objects of ours lie under ``<prefix>/kvw1/``. The bucket must allow GetObject, PutObject, DeleteObject and ListBucket;
without the last one S3 answers 403 where an object is missing. Capacity is the business of a lifecycle rule of the bucket.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import islice
from typing import Any

from kvweave.core.keys import ChunkKey
from kvweave.errors import InvalidOption, MissingExtra
from kvweave.store.base import BlobInfo, MissReason, PutHints, Rejected, TierError
from kvweave.store.memory_blobs import BATCH, erase_listed

LARGEST = 5 * 2**30
"""Bytes of the largest object that S3 takes in one PUT."""
_FIRST = 64 * 1024
"""Bytes fetched on opening: the header of a record, for the price of a request that is needed anyway."""
_EXPIRES = "kvweave-expires"
_RACES = 8


class S3Blobs:
    """``config`` goes to obstore's ``S3Store``, which also reads the usual AWS_* variables.

    ``timeout`` [s] is how long connecting, and an answer's first byte, may take; a call as a whole ends by its deadline.
    """

    name = "s3"
    min_read = 8 * 2**20

    def __init__(
        self, bucket: str, prefix: str = "", *, timeout: float = 2.0, allow_http: bool = False, **config: Any
    ) -> None:
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError:
            raise MissingExtra("obstore", "s3", "An S3 tier") from None
        self._errors = obstore.exceptions
        try:
            self._store = S3Store(
                bucket,
                config=config,  # type: ignore[arg-type]
                client_options={
                    "allow_http": allow_http,
                    "connect_timeout": timedelta(seconds=timeout),
                    "timeout": timedelta(hours=1),  # of a whole call, which our deadlines end
                },
                retry_config={"max_retries": 0},  # Guarded does that, within the deadline
            )
        except obstore.exceptions.BaseError:
            # Without the library's text, which may quote a value.
            raise InvalidOption(
                f"The S3 tier of bucket '{bucket}' can't be set up. "
                "Give access_key_id and secret_access_key together, or neither, and a region."
            ) from None
        self._root = f"{prefix.strip('/')}/kvw1".lstrip("/")
        self._timeout = timeout
        self._loop = _Loop(f"kvweave-s3-{bucket}")

    def open(self, key: ChunkKey, deadline: float) -> _S3Blob | None:
        got = self._get(self._path(key), {"range": (0, _FIRST)}, deadline)
        if got is None:
            return None
        first, meta = got
        return _S3Blob(self, self._path(key), int(meta["size"]), str(meta["e_tag"]), first)

    def contains(self, key: ChunkKey, deadline: float) -> bool:
        try:
            found = self._call(
                lambda: self._store.get_async(self._path(key), options={"head": True}), deadline, self._timeout
            )
        except _Absent:
            return False
        return float(found.attributes.get(_EXPIRES, math.inf)) > time.time()

    def was_evicted(self, key: ChunkKey) -> bool:
        """Whoever makes room there doesn't tell."""
        return False

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        if len(value) > LARGEST:
            raise Rejected("no_room")
        if self.epoch(key.scope, deadline) > hints.epoch:
            raise Rejected("stale")
        path = self._path(key)
        attributes = {} if math.isinf(hints.expires) else {_EXPIRES: str(hints.expires)}
        self._call(lambda: self._store.put_async(path, value, attributes=attributes, use_multipart=False), deadline)
        # The tenant may have been erased while the value was on its way, after the erasing listed what there was.
        if self.epoch(key.scope, deadline) > hints.epoch:
            self._call(lambda: self._store.delete_async(path), deadline)
            raise Rejected("stale")

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        self._call(lambda: self._store.delete_async(self._path(key)), time.monotonic() + self._timeout)

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        """Asks for each key first, since S3 doesn't tell which ones there were."""
        paths = map(self._path, keys)
        count = 0
        while batch := list(islice(paths, BATCH)):
            count += self._call(lambda batch=batch: self._delete(batch), deadline)  # type: ignore[misc]
        return count

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        if scope is None:
            prefixes = [f"{self._root}/"]
        else:
            listed = self._call(lambda: self._store.list_with_delimiter_async(f"{self._root}/"), self._page_deadline())
            prefixes = [f"{model}/{scope.hex()}/" for model in listed["common_prefixes"]]
        for prefix in prefixes:
            stream = self._store.list(prefix, chunk_size=BATCH)
            while chunk := self._call(lambda s=stream: _page(s), self._page_deadline()):  # type: ignore[misc]
                for meta in chunk:
                    if key := _key(meta["path"].removeprefix(f"{self._root}/")):
                        yield BlobInfo(key, meta["size"], created=meta["last_modified"].timestamp())

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        return erase_listed(self, scope, deadline)

    def epoch(self, scope: bytes, deadline: float) -> int:
        return self._epoch(scope, deadline)[0]

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        """Compare and swap, so that no writer lowers what another one raised."""
        path, value = self._epoch_path(scope), str(epoch).encode()
        for _ in range(_RACES):
            found, version = self._epoch(scope, deadline)
            if found >= epoch:
                return
            mode: Any = "create" if version is None else {"e_tag": version}
            try:
                self._call(lambda mode=mode: self._store.put_async(path, value, mode=mode), deadline)  # type: ignore[misc]
                return
            except _Lost:
                continue
        raise TierError("busy", "others keep raising this epoch")

    def ping(self, deadline: float) -> None:
        """Whether the bucket is there and may be listed; raises ``TierError``."""
        self._call(lambda: self._store.list_with_delimiter_async(f"{self._root}/epochs/none/"), deadline)

    def close(self) -> None:
        self._loop.close()

    def read(self, path: str, version: str, offset: int, length: int, deadline: float) -> memoryview:
        """Exactly these bytes of one version of an object; raises ``TierError``."""
        try:
            got = self._get(path, {"range": (offset, offset + length), "if_match": version}, deadline)
        except _Lost:
            got = None
        # Stores that don't know If-Match give whatever they have; its tag says so.
        if got is None or got[1]["e_tag"] != version:
            raise TierError("evicted", "deleted or replaced while it was read")
        if len(got[0]) != length:
            raise TierError("short", f"{len(got[0])} of {length} bytes")
        return got[0]

    def _get(self, path: str, options: Any, deadline: float) -> tuple[memoryview, Any] | None:
        """Bytes and what the store says of the object; None: there is none."""
        try:
            answer = self._call(lambda: self._store.get_async(path, options=options), deadline, self._timeout)
        except _Absent:
            return None
        return memoryview(self._call(answer.bytes_async, deadline)), answer.meta

    def _epoch(self, scope: bytes, deadline: float) -> tuple[int, str | None]:
        got = self._get(self._epoch_path(scope), None, deadline)
        if got is None:
            return 0, None
        try:
            return int(bytes(got[0])), str(got[1]["e_tag"])
        except ValueError:
            raise TierError("io", "an epoch object holds no number") from None

    async def _delete(self, paths: list[str]) -> int:
        limit = asyncio.Semaphore(16)

        async def exists(path: str) -> bool:
            async with limit:
                try:
                    await self._store.head_async(path)
                except FileNotFoundError:
                    return False
                return True

        there = [path for path, found in zip(paths, await asyncio.gather(*map(exists, paths)), strict=True) if found]
        if there:
            await self._store.delete_async(there)
        return len(there)

    def _call(self, work: Callable[[], Any], deadline: float, longest: float = math.inf) -> Any:
        """``await work()`` until the deadline, or for ``longest`` [s]; raises ``TierError`` alone."""
        left = min(longest, deadline - time.monotonic())
        if left <= 0:
            raise TierError("deadline", "already passed")
        try:
            return self._loop.run(work, left)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise TierError("io", "no such bucket") from None
            raise _Absent("io", "not found") from None
        except (self._errors.PreconditionError, self._errors.AlreadyExistsError):
            raise _Lost("io", "a condition doesn't hold") from None
        except TimeoutError:
            raise TierError("deadline", f"no answer within {left:.3g} s") from None
        except (self._errors.BaseError, OSError, ValueError) as error:
            raise _tier_error(error) from None

    def _page_deadline(self) -> float:
        return time.monotonic() + 10 * self._timeout

    def _path(self, key: ChunkKey) -> str:
        return f"{self._root}/{key.name}.kvr"

    def _epoch_path(self, scope: bytes) -> str:
        return f"{self._root}/epochs/{scope.hex()}"


class _S3Blob:
    def __init__(self, blobs: S3Blobs, path: str, size: int, version: str, first: memoryview) -> None:
        self._blobs = blobs
        self._path = path
        self._version = version
        self._first = first
        self.size = size

    def read(self, offset: int, length: int, deadline: float) -> AbstractContextManager[memoryview]:
        length = max(0, min(length, self.size - offset))
        if not length or offset + length <= len(self._first):
            return nullcontext(self._first[offset : offset + length])
        return nullcontext(self._blobs.read(self._path, self._version, offset, length, deadline))

    def close(self) -> None:
        """Nothing is held."""


class _Loop:
    """A thread with an event loop: obstore's own calls can't be left at a deadline, coroutines can."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Any], seconds: float) -> Any:
        """``await work()`` there; raises ``TimeoutError``."""

        async def limited() -> Any:
            # What obstore returns wants a running loop and isn't a coroutine.
            return await asyncio.wait_for(_awaited(work), None if seconds == math.inf else seconds)

        coroutine = limited()
        try:
            # The loop keeps the time; waiting longer than it may would only hide that it is stuck.
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            return future.result(seconds + 1 if seconds < math.inf else None)
        except (CancelledError, RuntimeError):  # closed while it ran, or before
            coroutine.close()
            raise TierError("io", "the tier was closed") from None

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()
        self._loop.close()

    def _cancel(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.call_soon(self._loop.stop)


async def _page(stream: Any) -> Any:
    """The next page of a listing; empty at its end."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return ()


async def _awaited(work: Callable[[], Any]) -> Any:
    return await work()


class _Absent(TierError):
    """The server answered that there is no such object."""


class _Lost(TierError):
    """A condition of the call doesn't hold: another one came first."""


def _tier_error(error: Exception) -> TierError:
    """Without the library's text, which holds addresses and the server's whole answer."""
    text = str(error)
    status = re.search(r"status code: (\d{3}[\w ]*)", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    kind = re.search(r"kind: (\w+),", text)
    parts = [match[1].strip() for match in (status, code) if match] or ([kind[1]] if kind else [])
    reason: MissReason = "deadline" if kind and kind[1] == "Timeout" else "io"
    return TierError(reason, ", ".join([type(error).__name__, *parts]))


def _key(path: str) -> ChunkKey | None:
    """None: not a record of ours."""
    try:
        model, scope, _, content = path.split("/")
        if not content.endswith(".kvr"):
            return None
        return ChunkKey(bytes.fromhex(model), bytes.fromhex(scope), bytes.fromhex(content.removesuffix(".kvr")))
    except ValueError:
        return None
