"""What every medium must do, whatever it is made of."""

from __future__ import annotations

import importlib.util
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch

from kvweave.core.keys import ChunkIdentity, ChunkKey, ModelFingerprint, Scope
from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.store import erasure
from kvweave.store.base import Blobs, ChunkRecord, Miss, PutHints, Rejected, TierError
from kvweave.store.compress import Compressed
from kvweave.store.guard import Guarded
from kvweave.store.host import HostStore
from kvweave.store.memory_blobs import MemoryBlobs
from kvweave.store.ranking import TextOrder
from kvweave.store.record import encode
from kvweave.store.tiered import TieredStore
from tests.store.media import FaultyBlobs, RecordingBlobs
from tests.store.servers import RedisServer, s3_server

MEDIA = ("memory", "redis", "s3", "disk")
VALUE = bytes(range(256)) * 700  # 179,200: more than what is fetched on opening
SIZES = (1, 63, 4096, 16 * 1024, 16 * 1024 + 1, 65536, 65537)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RedisServer(tmp_path_factory.mktemp("redis")).running() as server:
        yield server.url


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with s3_server("bucket") as endpoint:
        yield endpoint


NUMBERS = count()


@pytest.fixture(params=[*MEDIA, *(f"{medium} compressed" for medium in MEDIA), "memory wrapped"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Blobs]]:
    """Opens one and the same empty medium, as often as one likes."""
    medium, _, wrapper = request.param.partition(" ")
    with ExitStack() as stack:
        bare = _opener(medium, request, tmp_path)

        def opened() -> Blobs:
            blobs = bare()
            if wrapper == "compressed":
                pytest.importorskip("zstandard", reason="needs kvweave[zstd]")
                blobs = Compressed(blobs)
            if wrapper == "wrapped":
                blobs = Guarded(RecordingBlobs(FaultyBlobs(blobs)))
            stack.callback(blobs.close)
            return blobs

        yield opened


def _opener(medium: str, request: pytest.FixtureRequest, folder: Path) -> Callable[[], Blobs]:
    if medium == "memory":
        memory = MemoryBlobs()
        return lambda: memory
    if medium == "redis":
        import redis

        from kvweave.store.redis_blobs import RedisBlobs

        url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
        return lambda: RedisBlobs(url)
    if medium == "s3":
        from kvweave.store.s3_blobs import S3Blobs

        endpoint, prefix = request.getfixturevalue("s3_endpoint"), f"test/{next(NUMBERS)}"
        keys = {"access_key_id": "id", "secret_access_key": "secret", "region": "us-east-1"}
        return lambda: S3Blobs("bucket", prefix, allow_http=True, endpoint=endpoint, **keys)
    if importlib.util.find_spec("kvweave.store.disk") is None:
        pytest.skip("no disk medium here")
    from kvweave.store.disk import DiskBlobs

    return lambda: DiskBlobs(folder, 64 * 2**20)


@pytest.fixture
def blobs(make: Callable[[], Blobs]) -> Blobs:
    return make()


def key(content: int, scope: int = 1, model: int = 1) -> ChunkKey:
    return ChunkKey(model.to_bytes(8, "big"), scope.to_bytes(8, "big"), content.to_bytes(16, "little"))


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def put(blobs: Blobs, at: ChunkKey, value: bytes, epoch: int = 0) -> None:
    blobs.put(at, memoryview(value), PutHints(epoch=epoch), soon())


def get(blobs: Blobs, at: ChunkKey, offset: int = 0, length: int | None = None) -> bytes | None:
    blob = blobs.open(at, soon())
    if blob is None:
        return None
    try:
        with blob.read(offset, blob.size if length is None else length, soon()) as data:
            return bytes(data)
    finally:
        blob.close()


def test_a_value_comes_back(blobs: Blobs) -> None:
    assert get(blobs, key(1)) is None
    assert not blobs.was_evicted(key(1))
    put(blobs, key(1), VALUE)
    assert get(blobs, key(1)) == VALUE
    assert get(blobs, key(2)) is None
    assert get(blobs, key(1, scope=2)) is None
    assert get(blobs, key(1, model=2)) is None


def test_values_of_any_size(blobs: Blobs) -> None:
    for size in SIZES:
        put(blobs, key(size), VALUE[:size])
    for size in SIZES:
        assert get(blobs, key(size)) == VALUE[:size]


def test_ranges(blobs: Blobs) -> None:
    put(blobs, key(1), VALUE)
    blob = blobs.open(key(1), soon())
    assert blob is not None
    assert blob.size == len(VALUE)
    end = len(VALUE)
    for start, stop in ((0, 1), (5, 70), (4096, 8192), (16383, 16385), (65535, 65537), (100_000, end), (0, end), (9, 9)):
        with blob.read(start, stop - start, soon()) as data:
            assert bytes(data) == VALUE[start:stop]
    blob.close()


def test_a_read_beyond_the_end_is_short(blobs: Blobs) -> None:
    for at, value in ((key(1), VALUE), (key(2), VALUE[:100])):
        put(blobs, at, value)
        assert get(blobs, at, len(value) - 10, 20) == value[-10:]
        assert get(blobs, at, len(value), 20) == b""
        assert get(blobs, at, len(value) + 5, 20) == b""


def test_bytes_of_a_read_stay_valid_while_others_are_read(blobs: Blobs) -> None:
    put(blobs, key(1), VALUE)
    blob = blobs.open(key(1), soon())
    assert blob is not None
    with blob.read(0, 100, soon()) as first, blob.read(100_000, 100, soon()) as second:
        assert bytes(first) == VALUE[:100]
        assert bytes(second) == VALUE[100_000:100_100]
    blob.close()


def test_storing_again_is_a_success(blobs: Blobs) -> None:
    put(blobs, key(1), VALUE)
    put(blobs, key(1), VALUE)
    assert get(blobs, key(1)) == VALUE
    assert len(list(blobs.scan())) == 1


def test_a_discarded_value_is_gone_and_can_be_stored_anew(blobs: Blobs) -> None:
    put(blobs, key(1), b"damaged")
    blobs.discard(key(1), "checksum")
    blobs.discard(key(2), "short")
    assert get(blobs, key(1)) is None
    assert list(blobs.scan()) == []
    put(blobs, key(1), VALUE)
    assert get(blobs, key(1)) == VALUE


def test_delete_tells_how_many_there_were(blobs: Blobs) -> None:
    for i in range(5):
        put(blobs, key(i), VALUE[: 100 + i])
    assert blobs.delete((key(i) for i in (1, 3, 7)), soon()) == 2
    assert blobs.delete([key(1)], soon()) == 0
    assert blobs.delete((info.key for info in blobs.scan(key(0, scope=5).scope)), soon()) == 0
    assert blobs.delete([], soon()) == 0
    assert [get(blobs, key(i)) is None for i in range(5)] == [False, True, False, True, False]


def test_whether_there_is_a_value(blobs: Blobs) -> None:
    assert not blobs.contains(key(1), soon())
    put(blobs, key(1), VALUE)
    assert blobs.contains(key(1), soon())
    assert not blobs.contains(key(1, scope=2), soon())
    assert [info.hits for info in blobs.scan()] == [0]
    blobs.discard(key(1), "checksum")
    assert not blobs.contains(key(1), soon())


def test_what_has_expired_is_not_there_and_may_be_stored_anew(blobs: Blobs, request: pytest.FixtureRequest) -> None:
    if "disk compressed" in request.node.name:
        pytest.skip("the disk looks into records, and is never compressed")
    expires = float(int(time.time()) + 2)
    at, value = expiring(expires)
    blobs.put(at, value, PutHints(expires=expires), soon())
    assert time.time() >= expires or blobs.contains(at, soon())
    limit = soon(30)
    while blobs.contains(at, soon()):
        assert time.monotonic() < limit
        time.sleep(0.05)
    at, value = expiring(math.inf)
    blobs.put(at, value, PutHints(), soon())
    assert blobs.contains(at, soon())
    assert get(blobs, at) == bytes(value)


def expiring(expires: float) -> tuple[ChunkKey, memoryview]:
    """An encoded record."""
    identity = ChunkIdentity.of([1, 2], [], ModelFingerprint.of(content="m"), Scope.of("t"))
    data = torch.arange(16.0).view(1, 2, 8)
    return identity.key, encode(ChunkRecord(identity, (data,), (data,), expires=expires), TextOrder(), "raw", "test")


def test_a_medium_that_is_there_answers(blobs: Blobs) -> None:
    blobs.ping(soon())


def test_scan_lists_values_and_scopes(blobs: Blobs) -> None:
    everything = {key(i, scope, model) for i in range(4) for scope in (1, 2) for model in (1, 2)}
    for at in everything:
        put(blobs, at, VALUE[: 1000 + at.content[0]])
    blobs.raise_epoch(key(0, 9).scope, 3, soon())  # not a value
    listed = list(blobs.scan())
    assert len(listed) == len(everything)
    assert {info.key for info in listed} == everything
    assert {info.key for info in blobs.scan(key(0, 2).scope)} == {k for k in everything if k.scope == key(0, 2).scope}
    assert list(blobs.scan(key(0, 3).scope)) == []
    for info in listed:
        assert 0 < info.size <= 1000 + info.key.content[0]  # compression may make it less
        assert info.created == 0 or abs(time.time() - info.created) < 3600


def test_erasing_a_scope(blobs: Blobs) -> None:
    mine, theirs = key(1, scope=1), key(1, scope=2)
    for at in (mine, theirs, key(2, scope=1, model=2)):
        put(blobs, at, VALUE)
    blobs.raise_epoch(mine.scope, 1, soon())
    size = sum(info.size for info in blobs.scan(mine.scope))
    assert blobs.erase(mine.scope, soon()) == (2, size)
    assert blobs.erase(mine.scope, soon()) == (0, 0)
    with pytest.raises(Rejected) as refused:
        put(blobs, mine, VALUE)
    assert refused.value.reason == "stale"
    assert get(blobs, mine) is None
    assert get(blobs, theirs) == VALUE
    put(blobs, mine, VALUE, epoch=1)
    assert get(blobs, mine) == VALUE


def test_erasing_a_tenant_covers_his_salts(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pairs: another salt and another tenant miss, the same ones hit; one erasure takes all that is the tenant's."""
    monkeypatch.setattr(erasure, "EPOCH_TTL", 0.0)
    layout = KVLayout((LayerSpec(4, 1, 8, 8),), torch.float32)
    store = TieredStore(HostStore(0), [blobs], layout=layout)
    scopes = {(t, s): store.scope(t).narrowed(s) for t in ("ada", "bob") for s in ("", "one", "two")}
    for scope in scopes.values():
        store.put(salted(scope), wait=True)
    assert store.flush(30)
    assert len(list(blobs.scan())) == len(scopes), "each has a record of its own"
    for scope in scopes.values():
        (found,) = store.find([salted(scope).identity])
        assert not isinstance(found, Miss)
        found.close()
    (missed,) = store.find([salted(store.scope("ada").narrowed("three")).identity])
    assert isinstance(missed, Miss)
    assert store.erase("ada").tiers[blobs.name].records == 3
    assert {info.key for info in blobs.scan()} == {salted(scopes["bob", s]).key for s in ("", "one", "two")}
    for (tenant, _), scope in scopes.items():
        (found,) = store.find([salted(scope).identity])
        assert isinstance(found, Miss) == (tenant == "ada")
        assert store.current(scope) == (tenant == "bob")
        store.put(salted(scope), wait=True)
    assert store.flush(30)
    assert len(list(blobs.scan())) == 3, "what was computed before the erasure stays out"
    for tier in store.tiers:
        tier.medium.pool.close()


def salted(scope: Scope) -> ChunkRecord:
    data = torch.arange(16.0).view(1, 2, 8)
    return ChunkRecord(ChunkIdentity.of([1, 2], [], ModelFingerprint.of(content="m"), scope), (data,), (data,))


def test_epochs_never_fall_and_every_process_sees_them(make: Callable[[], Blobs]) -> None:
    one, other = make(), make()
    scope = key(1).scope
    assert one.epoch(scope, soon()) == 0
    one.raise_epoch(scope, 10, soon())
    one.raise_epoch(scope, 9, soon())
    assert one.epoch(scope, soon()) == 10
    until = soon(1.5)
    while other.epoch(scope, soon()) != 10:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert one.epoch(key(1, scope=2).scope, soon()) == 0


def test_epochs_raised_at_once_end_at_the_highest(make: Callable[[], Blobs]) -> None:
    blobs, scope = make(), key(1).scope
    run([lambda e=e: blobs.raise_epoch(scope, e, soon()) for e in (3, 1, 4, 2)])
    assert blobs.epoch(scope, soon()) == 4


def test_many_threads(blobs: Blobs) -> None:
    """A read gives a value that was written under its key, or nothing."""
    if "s3" in blobs.name:  # the server of the tests answers 500 now and then when it is asked by many at once
        blobs = Guarded(blobs, attempts=10)

    def value(i: int) -> bytes:
        return i.to_bytes(2, "big") * 20_000

    def work(thread: int) -> None:
        for round_ in range(6):
            i = (thread + round_) % 4
            put(blobs, key(i), value(i))
            assert get(blobs, key(i)) in (None, value(i))
            assert get(blobs, key((i + 1) % 4), 30_000, 10_000) in (None, value((i + 1) % 4)[30_000:])
            if round_ % 3 == 2:
                blobs.delete([key(i)], soon())

    # Deleted or replaced between open and read is a failure that says so, where a medium can't hold on to a version.
    run([lambda t=t: retrying(lambda: work(t)) for t in range(6)])


def retrying(work: Callable[[], None]) -> None:
    for _ in range(20):
        try:
            return work()
        except TierError as error:
            if error.reason not in ("evicted", "short"):
                raise
    raise AssertionError("never got through")


def run(works: list[Callable[[], object]]) -> None:
    """All at once; raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_a_deadline_that_has_passed(blobs: Blobs) -> None:
    """Whatever needs no waiting may be had; all else says why not."""
    put(blobs, key(1), VALUE)
    reason = ""
    try:
        assert blobs.open(key(1), time.monotonic() - 1) is not None
    except TierError as error:
        reason = error.reason
    assert reason in ("", "deadline")
