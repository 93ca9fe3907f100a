"""Failing system calls and dying writers: nothing half-written is ever seen, nothing is lost track of.

``python -m tests.store.test_disk_crash 2000`` kills that many writers instead of the usual 200.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave.core.keys import ChunkKey
from kvweave.store import catalog, disk_upkeep
from kvweave.store.base import PutHints, Rejected, TierError
from kvweave.store.disk import DiskBlobs
from tests.store.test_disk import FOREVER, PAGE, A, B, content, files, get, key, leftovers, opened, put

CALLS = {"open", "write", "fchmod", "close", "rename", "fsync", "mkdir", "chmod", "stat", "fstat", "statvfs", "unlink"}
MODULES = [
    module for name, module in sys.modules.items() if name.startswith("kvweave.store.") and vars(module).get("os") is os
]
CALLS |= {"listdir", "scandir", "preadv", "rmdir"}


class Os:
    """The ``os`` module, where ``before(number, name)`` is called before each of ``CALLS``."""

    def __init__(self, before: Callable[[int, str], None]) -> None:
        self.before = before
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in CALLS:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            try:
                self.before(self.count, name)
            except OSError:
                if name == "close":  # a descriptor is closed even when closing it reports an error
                    os.close(args[0])
                raise
            return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def watched(before: Callable[[int, str], None]) -> Iterator[Os]:
    proxy = Os(before)
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "os", proxy)
        yield proxy


def quiet(root: Path, capacity: int = 10**9, **options: Any) -> DiskBlobs:
    """A store whose background thread sleeps."""
    store = DiskBlobs(root, capacity, free_floor=0.0, **options)
    assert store.reconciled.wait(5)
    assert store._parts.upkeep.tried.wait(5)
    time.sleep(0.01)
    return store


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def rare_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_upkeep, "FLUSH_SECONDS", 3600.0)


@pytest.mark.parametrize("durability", ["cache", "durable"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_at_any_call_leaves_nothing(tmp_path: Path, code: int, durability: str) -> None:
    store = quiet(tmp_path / "s", durability=durability)
    put(store, key(0))
    failed = 0
    for number in range(1, 200):
        chunk = key(number, bytes([number]) * 8)  # a new folder each time
        before = (store._parts.catalog.used(), descriptors())

        def fail(n: int, name: str, number: int = number) -> None:
            if n == number:
                raise OSError(code, os.strerror(code))

        raised = None
        with watched(fail) as calls:
            try:
                put(store, chunk)
            except (Rejected, TierError) as error:
                raised = error.reason
        if raised is not None:
            failed += 1
            assert raised in (("no_room", "io") if code == errno.ENOSPC else ("io",))
            assert get(store, chunk) is None
            assert (store._parts.catalog.used(), descriptors()) == before
        assert not leftovers(tmp_path / "s")
        assert sum(store._parts.catalog.used().values()) == sum(files(tmp_path / "s").values())
        put(store, chunk)
        assert get(store, chunk) == content(chunk)
        if calls.count < number:
            break
    else:
        pytest.fail("never got through")
    assert failed >= 10
    store.close()


def test_a_disk_that_dies_during_a_write_is_cleaned_when_it_is_back(tmp_path: Path) -> None:
    store = quiet(tmp_path / "s")
    put(store, key(0))
    unfinished = 0
    for number in range(1, 40):
        chunk = key(number)

        def fail(n: int, name: str, number: int = number) -> None:
            if n >= number:
                raise OSError(errno.EIO, "dead")

        with watched(fail), contextlib.suppress(TierError):
            put(store, chunk)
        unfinished += store._parts.cleanup.pending
        store._parts.cleanup.retry()
        assert not leftovers(tmp_path / "s")
        assert sum(store._parts.catalog.used().values()) == sum(files(tmp_path / "s").values())
        assert get(store, chunk) in (None, content(chunk))
    assert unfinished >= 5
    store.close()


def test_a_failing_catalogue_makes_the_write_fail_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = quiet(tmp_path / "s")
    settle = store._parts.catalog.settle
    tries: list[int] = []

    def busy_once(claim: catalog.Claim) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise TierError("busy")
        settle(claim)

    monkeypatch.setattr(store._parts.catalog, "settle", busy_once)
    with pytest.raises(TierError, match="busy"):
        put(store, key(1))
    assert len(tries) == 2
    assert files(tmp_path / "s") == {}
    assert store._parts.catalog.used() == {}
    store.close()


def test_a_read_that_fails_is_an_io_error_and_leaks_nothing(tmp_path: Path) -> None:
    store = quiet(tmp_path / "s")
    put(store, key(1), 3)
    get(store, key(1))
    before, failed = descriptors(), []
    for number in range(1, 10):

        def fail(n: int, name: str, number: int = number) -> None:
            if n == number:
                raise OSError(errno.EIO, "dead")

        with watched(fail):
            try:
                assert get(store, key(1)) == content(key(1), 3)
            except TierError as error:
                failed.append(error.reason)
        assert descriptors() == before
    assert failed == ["io"] * 3  # open, fstat, preadv
    assert get(store, key(1)) == content(key(1), 3)
    store.close()


@pytest.mark.parametrize("what", ["delete", "discard", "erase"])
def test_removals_that_fail_can_be_repeated(tmp_path: Path, what: str) -> None:
    store = quiet(tmp_path / "s")
    for number in range(1, 60):
        put(store, key(1))
        put(store, key(2, B))

        def fail(n: int, name: str, number: int = number) -> None:
            if n == number:
                raise OSError(errno.EIO, "dead")

        def remove() -> None:
            if what == "delete":
                store.delete([key(1)], FOREVER)
            elif what == "discard":
                store.discard(key(1), "checksum")
            else:
                store.erase(A, FOREVER)

        with watched(fail) as calls, contextlib.suppress(TierError):
            remove()
        remove()
        store._parts.cleanup.retry()
        assert store.open(key(1), FOREVER) is None
        assert get(store, key(2, B)) == content(key(2, B))
        store._refused.clear()
        store._parts.damaged.count()
        assert sum(store._parts.catalog.used().values()) == sum(files(tmp_path / "s").values())
        if calls.count < number:
            return
    pytest.fail("never got through")


def test_a_listing_without_a_catalogue_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(quiet(tmp_path / "s")) as store:
        put(store, key(1))
        (chunk,) = store.scan()

        def busy(tag: str | None) -> None:
            raise TierError("busy")

        monkeypatch.setattr(store._parts.catalog, "listing", busy)
        assert [info.key for info in store.scan()] == [chunk.key]  # by the files

        def fail(n: int, name: str) -> None:
            raise OSError(errno.EIO, "dead")

        with watched(fail), pytest.raises(TierError, match="dead"):
            list(store.scan())


def test_what_must_survive_a_power_failure_is_synced_before_and_after_it_gets_its_name(tmp_path: Path) -> None:
    calls: list[str] = []
    with watched(lambda n, name: calls.append(name)):
        store = DiskBlobs(tmp_path / "s", 10**9, free_floor=0.0, durability="durable")
        assert store._parts.upkeep.tried.wait(5)
        epoch = len(calls)
        store.raise_epoch(A, 1, FOREVER)
        record = len(calls)
        put(store, key(1, B))
    store.close()
    for start in (0, epoch, record):
        renamed = calls.index("rename", start)
        assert "fsync" in calls[start:renamed]
        assert "fsync" in calls[renamed:]


def forked(work: Callable[[], None]) -> int:
    """A child process that does ``work`` and nothing else of ours."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def check(root: Path, chunks: list[ChunkKey], capacity: int) -> int:
    """What a restart finds is right and complete; returns how many records there are."""
    with opened(root, capacity) as store:
        assert store.reconciled.wait(10)
        assert not leftovers(root)
        assert list((root / "v1/owners").iterdir()) == [root / f"v1/owners/{store._parts.owners.name}.lock"]
        found = 0
        for chunk in chunks:
            data = get(store, chunk)
            if data is not None:
                found += 1
                assert data == content(chunk, len(data) // PAGE)
                assert len(data) >= PAGE
        held = files(root)
        assert store.stats().bytes == sum(held.values()) <= capacity
        assert store.stats().records == found == len(held)
        assert store._parts.catalog.claims() == []
    return found


def test_a_writer_killed_before_any_call_leaves_a_sound_store(tmp_path: Path) -> None:
    root, capacity = tmp_path / "s", 8 * PAGE
    with opened(root, capacity) as store:
        for i in range(7):
            put(store, key(i))
    seen, chunks = set(), [key(i) for i in range(7)]
    for number in range(1, 120):
        chunk = key(100 + number, bytes([number]) * 8)

        def work(number: int = number, chunk: ChunkKey = chunk) -> None:
            store = quiet(root, capacity) if number % 2 else DiskBlobs(root, capacity, free_floor=0.0)
            assert store.reconciled.wait(5)

            def die(count: int, name: str) -> None:
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            with watched(die):
                put(store, chunk)  # with an eviction

        _, status = os.waitpid(forked(work), 0)
        chunks.append(chunk)
        seen.add(check(root, chunks, capacity))
        if not os.WIFSIGNALED(status):
            assert status == 0
            break
    else:
        pytest.fail("never got through")
    assert number > 12
    assert len(seen) > 1


def kill_writers(root: Path, kills: int, together: int = 4) -> int:
    """Writers on one small folder, killed at random; returns how many records were found after all restarts."""
    chunks, capacity, found = [key(i, (A, B)[i % 2]) for i in range(60)], 40 * PAGE, 0
    rng = random.Random(5)
    for first in range(0, kills, together):

        def write(seed: int) -> None:
            own = random.Random(seed)
            store = DiskBlobs(root, capacity, free_floor=0.0)
            while True:
                chunk = own.choice(chunks)
                pick = own.random()
                if pick < 0.1:
                    store.delete([chunk], FOREVER)
                elif pick < 0.15:
                    store.open(chunk, FOREVER)
                else:
                    with contextlib.suppress(Rejected):
                        store.put(chunk, memoryview(content(chunk, own.randint(1, 4))), PutHints(), FOREVER)

        children = [forked(lambda seed=first + i: write(seed)) for i in range(together)]
        for child in children:
            time.sleep(rng.uniform(0.002, 0.04))
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a writer ended by itself"
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        found += check(root, chunks, capacity)
    return found


def test_writers_killed_at_random_leave_a_sound_store(tmp_path: Path) -> None:
    assert kill_writers(tmp_path / "s", 200) > 200


def test_the_check_after_a_crash_can_fail(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key(1))
        put(store, key(2))
        path = Path(store._files.record(key(1).name))
    assert check(tmp_path / "s", [key(1), key(2)], 10**9) == 2
    path.write_bytes(path.read_bytes()[:100] + b"?" + path.read_bytes()[101:])
    with pytest.raises(AssertionError):
        check(tmp_path / "s", [key(1), key(2)], 10**9)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(kill_writers(Path(place) / "s", int(sys.argv[1])), "records found after all restarts")
