"""The disk medium against a dict, and each promise of its docstrings on its own."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvweave.core.keys import ChunkIdentity, ChunkKey, ModelFingerprint, Scope
from kvweave.errors import InvalidOption, PinQuotaExceeded
from kvweave.store import folder
from kvweave.store.aligned import BufferPool
from kvweave.store.base import ChunkRecord, PutHints, Rejected, TierError
from kvweave.store.catalog import Catalog
from kvweave.store.disk import DiskBlobs
from kvweave.store.eviction import Quota
from kvweave.store.folder import file_system
from kvweave.store.ranking import TextOrder
from kvweave.store.reader import SharedBlob
from kvweave.store.record import FIRST_READ, encode, header_length

PAGE = 4096
FOREVER = float("inf")
A, B = b"A" * 8, b"B" * 8


def key(i: int, scope: bytes = A, model: bytes = b"modelone") -> ChunkKey:
    return ChunkKey(model, scope, random.Random(i).randbytes(16))


def content(chunk: ChunkKey, pages: int = 1) -> bytes:
    """What is stored under a key: follows from the key, different on every page."""
    return random.Random(chunk.scope + chunk.content).randbytes(PAGE * pages)


def aligned(data: bytes) -> memoryview:
    """As values come from the encoder: in memory that starts at a page border."""
    room = mmap.mmap(-1, max(PAGE, len(data)))
    room[: len(data)] = data
    return memoryview(room)[: len(data)]


def put(store: DiskBlobs, chunk: ChunkKey, pages: int = 1, **hints: Any) -> None:
    store.put(chunk, aligned(content(chunk, pages)), PutHints(**hints), FOREVER)


def get(store: DiskBlobs, chunk: ChunkKey, offset: int = 0, length: int = 10**9) -> bytes | None:
    blob = store.open(chunk, FOREVER)
    if blob is None:
        return None
    try:
        with blob.read(offset, length, FOREVER) as data:
            return bytes(data)
    finally:
        blob.close()


def files(root: Path) -> dict[str, int]:
    """Bytes of every file that holds, held or will hold a record."""
    found = [
        p for p in (root / "v1").rglob("*") if p.suffix == ".kvr" or p.name.startswith(".tmp") or p.parent.name == "damaged"
    ]
    return {p.name: p.stat().st_size for p in found}


def leftovers(root: Path) -> list[str]:
    return [name for name in files(root) if name.startswith(".tmp")]


@contextlib.contextmanager
def opened(root: Path, capacity: int | None = 10**9, **options: Any) -> Iterator[DiskBlobs]:
    store = DiskBlobs(root, capacity, **{"free_floor": 0.0, **options})
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


KEYS = st.integers(0, 11)
CAPACITY = 12 * PAGE


class Disk(RuleBasedStateMachine):
    """Every answer is the content of the key or a miss; a miss needs a reason: removed, evicted, or never stored."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.root = self.place / "s"
        self.model: dict[ChunkKey, int] = {}
        self.pinned: set[ChunkKey] = set()
        self.epochs = {A: 0, B: 0}
        self.refusals: set[str] = set()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(os, "fsync", lambda descriptor: None)  # nothing here depends on it but the time it takes
        self.start()

    def start(self) -> None:
        self.store = DiskBlobs(self.root, CAPACITY, free_floor=0.0, quotas={B: Quota(reserved=2 * PAGE, max=5 * PAGE)})

    def teardown(self) -> None:
        self.store.close()
        self.patch.undo()
        shutil.rmtree(self.place)

    @staticmethod
    def key(i: int) -> ChunkKey:
        return key(i, B if i % 3 == 0 else A)

    def drop_evicted(self) -> None:
        for chunk in [c for c in self.model if not self.store.contains(c)]:
            assert self.store.was_evicted(chunk)
            assert chunk not in self.pinned
            del self.model[chunk]

    @rule(i=KEYS, pages=st.integers(1, 4))
    def put(self, i: int, pages: int) -> None:
        chunk = self.key(i)
        reserved_before = sum(n for c, n in self.model.items() if c.scope == B)
        try:
            put(self.store, chunk, pages, epoch=self.epochs[chunk.scope])
        except Rejected as error:
            self.refusals.add(error.reason)
            assert self.pinned or pages + sum(n for c, n in self.model.items() if c.scope == B) > 5 or pages > 4
        else:
            assert self.store.contains(chunk)
            self.model.setdefault(chunk, pages)
        if chunk.scope == A:
            self.drop_evicted()
            assert sum(n for c, n in self.model.items() if c.scope == B) >= min(2, reserved_before)
        self.drop_evicted()
        assert sum(n for c, n in self.model.items() if c.scope == B) <= 5

    @rule(i=KEYS, offset=st.integers(0, 4 * PAGE), length=st.integers(0, 3 * PAGE))
    def read(self, i: int, offset: int, length: int) -> None:
        chunk = self.key(i)
        expected = content(chunk, self.model[chunk])[offset : offset + length] if chunk in self.model else None
        assert get(self.store, chunk, offset, length) == expected

    @rule(chosen=st.lists(KEYS, max_size=3, unique=True))
    def delete(self, chosen: list[int]) -> None:
        chunks = [self.key(i) for i in chosen]
        assert self.store.delete(chunks, FOREVER) == sum(c in self.model for c in chunks)
        for chunk in chunks:
            self.model.pop(chunk, None)
            self.pinned.discard(chunk)

    @rule(i=KEYS)
    def discard(self, i: int) -> None:
        self.store.discard(self.key(i), "checksum")
        self.model.pop(self.key(i), None)
        self.pinned.discard(self.key(i))

    @rule(i=KEYS)
    def pin(self, i: int) -> None:
        chunk = self.key(i)
        size = {c: n for c, n in self.model.items() if c in self.pinned or c == chunk}
        if sum(size.values()) * PAGE > CAPACITY // 2 and chunk in self.model:
            with pytest.raises(PinQuotaExceeded):
                self.store.pin(chunk, time.time() + 999, "test")
            return
        assert self.store.pin(chunk, time.time() + 999, "test") == (chunk in self.model)
        self.pinned |= {chunk} & set(self.model)

    @rule(i=KEYS)
    def unpin(self, i: int) -> None:
        assert self.store.unpin(self.key(i)) == (self.key(i) in self.pinned)
        self.pinned.discard(self.key(i))

    @rule(scope=st.sampled_from([A, B]))
    def erase(self, scope: bytes) -> None:
        self.epochs[scope] += 1
        self.store.raise_epoch(scope, self.epochs[scope], FOREVER)
        mine = {c: n for c, n in self.model.items() if c.scope == scope}
        assert self.store.erase(scope, FOREVER) == (len(mine), PAGE * sum(mine.values()))
        assert self.store.epoch(scope, FOREVER) == self.epochs[scope]
        with pytest.raises(Rejected, match="stale"):
            put(self.store, key(0, scope), epoch=self.epochs[scope] - 1)
        self.model = {c: n for c, n in self.model.items() if c.scope != scope}
        self.pinned &= set(self.model)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.start()
        assert self.store.reconciled.wait(5)

    @precondition(lambda self: not self.pinned)
    @rule()
    def lose_the_catalogue(self) -> None:
        self.store.close()
        (self.root / "v1/catalog.sqlite").unlink()
        self.start()
        assert self.store.reconciled.wait(5)

    @invariant()
    def agrees(self) -> None:
        held = files(self.root)
        stats = self.store.stats()
        assert stats.bytes == sum(held.values()) <= CAPACITY
        assert stats.records == len(self.model)
        assert stats.errors == 0
        assert self.refusals <= {"no_room", "quota"}
        assert {info.key: info.size for info in self.store.scan()} == {c: n * PAGE for c, n in self.model.items()}
        assert {i.key for i in self.store.scan() if i.pinned_until} == self.pinned
        assert not leftovers(self.root)


TestDisk = Disk.TestCase
TestDisk.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_files_and_folders_are_private_whatever_the_umask(root: Path) -> None:
    for mask in (0, 0o777):
        before = os.umask(mask)
        try:
            with opened(root / str(mask)) as store:
                put(store, key(1))
                store.raise_epoch(A, 3, FOREVER)
                store.discard(key(1), "checksum")
                put(store, key(2), epoch=3)
                modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (root / str(mask)).rglob("*")}
        finally:
            os.umask(before)
            if mask:
                os.chmod(root, 0o700)
        assert len(modes) > 12
        assert {p: oct(m) for p, m in modes.items() if m != (0o700 if p.is_dir() else 0o600)} == {}


def test_reads_anywhere_give_the_same_bytes_with_and_without_the_page_cache(root: Path) -> None:
    chunk = key(1)
    data = content(chunk, 5)
    for direct in ("auto", "off"):
        with opened(root, direct=direct) as store:
            put(store, chunk, 5)
            for offset, length in [
                (0, 1),
                (1, PAGE),
                (PAGE - 1, 2),
                (3 * PAGE, 5 * PAGE),
                (5 * PAGE, 1),
                (10**9, 5),
                (7, 0),
            ]:
                assert get(store, chunk, offset, length) == data[offset : offset + length]


def test_values_that_direct_io_cannot_write_are_written_all_the_same(root: Path) -> None:
    with opened(root) as store:
        odd, shifted = content(key(1))[:1234], aligned(b"x" + content(key(2)))[1:]
        store.put(key(1), memoryview(odd), PutHints(), FOREVER)
        store.put(key(2), shifted, PutHints(), FOREVER)
        store.put(key(3), memoryview(b""), PutHints(), FOREVER)
        assert [get(store, key(i)) for i in (1, 2, 3)] == [odd, content(key(2)), b""]


def test_large_values_and_short_system_calls(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[: 2 * PAGE]))
    # Through a memoryview: a slice of the probe's own map would be a copy that can't be read into.
    monkeypatch.setattr(os, "preadv", lambda fd, room, at: preadv(fd, [memoryview(room[0])[:PAGE]], at))
    with opened(root) as store:
        put(store, key(1), 9)
        assert get(store, key(1)) == content(key(1), 9)


def test_a_file_that_was_cut_gives_fewer_bytes(root: Path) -> None:
    with opened(root) as store:
        put(store, key(1), 3)
        blob = store.open(key(1), FOREVER)
        assert blob is not None
        os.truncate(store._files.record(key(1).name), PAGE + 100)
        with blob.read(0, 3 * PAGE, FOREVER) as data:
            assert bytes(data) == content(key(1), 3)[: PAGE + 100]
        with blob.read(2 * PAGE, PAGE, FOREVER) as data:
            assert len(data) == 0
        blob.close()
        assert get(store, key(1)) == content(key(1), 3)[: PAGE + 100]


def test_an_open_blob_survives_deletion_and_replacement(root: Path) -> None:
    with opened(root) as store:
        put(store, key(1), 2)
        blob = store.open(key(1), FOREVER)
        assert blob is not None
        store.delete([key(1)], FOREVER)
        store.put(key(1), aligned(b"n" * PAGE), PutHints(), FOREVER)
        with blob.read(0, 2 * PAGE, FOREVER) as data:
            assert bytes(data) == content(key(1), 2)
        assert get(store, key(1)) == b"n" * PAGE
        blob.close()
        with pytest.raises(ValueError), blob.read(0, 1, FOREVER):
            pass


def test_a_late_read_or_write_is_refused(root: Path) -> None:
    with opened(root) as store:
        put(store, key(1))
        blob = store.open(key(1), FOREVER)
        assert blob is not None
        with pytest.raises(TierError, match="deadline"), blob.read(0, 10, time.monotonic() - 1):
            pass
        blob.close()
        with pytest.raises(TierError, match="deadline"):
            store.put(key(2), aligned(content(key(2))), PutHints(), time.monotonic() - 1)
        assert not leftovers(root)
        assert store.stats().bytes == PAGE


def test_closing_under_a_reader_leaves_its_descriptor_to_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(root) as store:
        put(store, key(1))
        opened_blob = store.open(key(1), FOREVER)
        assert opened_blob is not None
        blob = SharedBlob(opened_blob)
        inside, go_on, read = threading.Event(), threading.Event(), os.preadv

        def slow(fd: int, room: list[memoryview], at: int) -> int:
            inside.set()
            assert go_on.wait(5)
            return read(fd, room, at)

        monkeypatch.setattr(os, "preadv", slow)
        found: list[bytes] = []

        def reader() -> None:
            with blob.read(0, PAGE, FOREVER) as data:
                found.append(bytes(data))

        thread = threading.Thread(target=reader)
        thread.start()
        assert inside.wait(5)
        blob.close()
        other = os.open(os.devnull, os.O_RDONLY)  # would get the number of the closed descriptor
        go_on.set()
        thread.join()
        os.close(other)
        assert found == [content(key(1))]


def test_memory_is_lent_again_only_when_nothing_points_to_it() -> None:
    pool = BufferPool()
    with pool.lend(PAGE) as view:
        view[:3] = b"abc"
    assert pool.kept == 65536
    with pytest.raises(ValueError):
        view[0]
    with pool.lend(PAGE) as view:
        kept = np.frombuffer(view, np.uint8)
        kept[:3] = 7
    assert pool.kept == 0  # an array still shows it
    with pool.lend(PAGE) as other:
        other[:3] = b"xyz"
    assert kept[:3].tolist() == [7, 7, 7]
    small = BufferPool(keep=65536)
    with small.lend(1), small.lend(1):
        pass
    assert small.kept == 65536


def test_threads_get_their_own_bytes_under_constant_eviction(root: Path) -> None:
    wrong: list[ChunkKey] = []
    hits: Counter[str] = Counter()
    with opened(root, 10 * PAGE) as store:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                chunk = key(rng.randrange(20))
                data = get(store, chunk)
                if data is None:
                    with contextlib.suppress(Rejected):
                        put(store, chunk)
                elif data == content(chunk):
                    hits["ok"] += 1
                else:
                    wrong.append(chunk)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert hits["ok"] > 20
        assert store.stats().evictions > 20
        assert store.stats().bytes == sum(files(root).values()) <= 10 * PAGE


def test_storing_twice_writes_once(root: Path) -> None:
    with opened(root) as store:
        put(store, key(1))
        store.put(key(1), aligned(b"z" * PAGE), PutHints(), FOREVER)
        assert get(store, key(1)) == content(key(1))
        stats = store.stats()
        assert (stats.puts, stats.duplicates, stats.records) == (1, 1, 1)


def test_the_least_recently_used_goes_first_also_after_a_restart(root: Path) -> None:
    with opened(root, 10 * PAGE) as store:
        for i in range(9):
            put(store, key(i))
            time.sleep(0.002)
        assert get(store, key(0)) is not None
    with opened(root, 10 * PAGE) as store:
        put(store, key(9))  # 10 of 10: down to 8
        assert [store.contains(key(i)) for i in range(4)] == [True, False, False, True]
        assert store.was_evicted(key(1))
        assert not store.was_evicted(key(0))
        assert not store.was_evicted(key(77))
    with opened(root, 10 * PAGE) as store:
        assert store.reconciled.wait(5)
        assert store.was_evicted(key(1))


def test_uses_reach_the_catalogue_in_batches(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(root) as store:
        put(store, key(1))
        writes: list[int] = []
        touch = store._parts.catalog.touch
        monkeypatch.setattr(store._parts.catalog, "touch", lambda uses: (writes.append(len(uses)), touch(uses)))
        for _ in range(50):
            get(store, key(1))
        assert len(writes) <= 1
        (info,) = store.scan()
        assert info.hits == 50
        stats = store.stats()
        assert (stats.opens, stats.hits) == (50, 50)
        assert get(store, key(5)) is None
        assert store.stats().opens == 51


def test_pinned_records_stay_and_block(root: Path) -> None:
    with opened(root, 10 * PAGE) as store:
        for i in range(2):
            put(store, key(i), 2)
            assert store.pin(key(i), time.time() + 60, "test")
        put(store, key(2), 6)
        with pytest.raises(PinQuotaExceeded, match="Unpin"):
            store.pin(key(2), time.time() + 60, "test")
        with pytest.raises(Rejected, match="no_room"):
            put(store, key(3), 7)
        assert store.contains(key(2))  # nothing was evicted in vain
        put(store, key(3), 5)
        assert [store.contains(key(i)) for i in range(4)] == [True, True, False, True]
        stats = store.stats()
        assert (stats.pins, stats.pinned_bytes) == (2, 4 * PAGE)
        assert (stats.capacity_evictions, stats.quota_evictions) == (1, 0)
        for bad in (time.time() - 1, FOREVER):
            with pytest.raises(InvalidOption):
                store.pin(key(0), bad, "test")
    with opened(root, None) as admin:  # the limit is the engine's
        with pytest.raises(PinQuotaExceeded):
            admin.pin(key(3), time.time() + 60, "test")
        assert admin.capacity == 10 * PAGE
        assert admin.unpin(key(0))
        assert admin.unpin(key(1))
        assert admin.pin(key(3), time.time() + 60, "test")


@pytest.mark.parametrize("limit", ["quota", "floor"])
def test_at_a_limit_few_writes_look_for_victims(limit: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing victims reads the whole catalogue: without a low mark every write at the limit would."""
    with opened(root, 1000 * PAGE, default_quota=Quota(max=100 * PAGE if limit == "quota" else None)) as store:
        if limit == "floor":
            monkeypatch.setattr(store._files, "space", lambda: (612 * PAGE - sum(files(root).values()), 1000 * PAGE))
        looks = []
        entries = Catalog.entries
        monkeypatch.setattr(Catalog, "entries", lambda catalog: looks.append(1) or entries(catalog))
        for i in range(160):
            put(store, key(i))
        assert all(store.contains(key(i)) for i in range(100, 160))
        assert store.stats().rejected == {}
        assert 0 < len(looks) <= 6


def test_quotas(root: Path) -> None:
    quotas = {A: Quota(max=3 * PAGE), B: Quota(reserved=4 * PAGE)}
    with opened(root, 10 * PAGE, quotas=quotas) as store:
        for i in range(4):
            put(store, key(i, A))
        assert [store.contains(key(i, A)) for i in range(4)] == [False, False, True, True]  # down to the low mark
        assert (store.stats().capacity_evictions, store.stats().quota_evictions) == (0, 2)
        with pytest.raises(Rejected, match="quota"):
            put(store, key(9, A), 4)
        assert store.usage()[A].records == 2  # nothing was evicted in vain
        assert store.stats().rejected == {"quota": 1}
        for i in range(4):
            put(store, key(i, B))
        for i in range(20):
            put(store, key(i, b"C" * 8))
        assert store.stats().capacity_evictions > 0
        assert (store.stats().pins, store.stats().quota_evictions) == (0, 2)
        assert store.usage()[B].bytes == 4 * PAGE
    with pytest.raises(InvalidOption, match="reserve"):
        DiskBlobs(root, 3 * PAGE, quotas=quotas)


def test_a_full_folder_is_counted_before_the_first_write(root: Path) -> None:
    with opened(root, 100 * PAGE) as store:
        for i in range(50):
            put(store, key(i))
    (root / "v1/catalog.sqlite").unlink()
    with opened(root, 20 * PAGE) as store:
        put(store, key(99))
        assert sum(files(root).values()) <= 16 * PAGE
        assert get(store, key(99)) == content(key(99))


def test_two_stores_on_one_folder_share_the_capacity(root: Path) -> None:
    with opened(root, 10 * PAGE) as one, opened(root, 10 * PAGE) as two:
        for i in range(30):
            put((one, two)[i % 2], key(i))
            assert sum(files(root).values()) <= 9 * PAGE
        assert one.stats().bytes == two.stats().bytes == sum(files(root).values())
        assert get(one, key(29)) == get(two, key(29)) == content(key(29))
        one.raise_epoch(A, 1, FOREVER)
        assert two.epoch(A, FOREVER) == 1
        with pytest.raises(Rejected, match="stale"):
            put(two, key(50))
        put(two, key(50), epoch=1)
        two.raise_epoch(A, 0, FOREVER)  # never goes back
        assert one.epoch(A, FOREVER) == 1


@pytest.mark.parametrize("when", ["before", "after", "after, files not yet"])
def test_an_erasure_during_a_write_takes_the_record_back(root: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    with opened(root) as store:
        put(store, key(5, B))
        rename = os.rename

        def erased_just_then(old: str, new: str) -> None:
            if not new.endswith(".kvr"):
                return rename(old, new)
            monkeypatch.setattr(os, "rename", rename)
            if when != "before":
                rename(old, new)
            store.raise_epoch(A, 1, FOREVER)
            if when != "after, files not yet":
                store.erase(A, FOREVER)
            return rename(old, new) if when == "before" else None

        monkeypatch.setattr(os, "rename", erased_just_then)
        with pytest.raises(Rejected, match="stale"):
            put(store, key(1))
        assert not store.contains(key(1))
        assert store.stats().bytes == PAGE
        assert store.stats().errors == 0


def test_epochs_survive_the_catalogue_and_damage_to_them_refuses(root: Path) -> None:
    with opened(root) as store:
        store.raise_epoch(A, 7, FOREVER)
    (root / "v1/catalog.sqlite").unlink()
    with opened(root) as store:
        assert store.epoch(A, FOREVER) == 7
        assert store.epoch(B, FOREVER) == 0
        (root / "v1/epochs" / B.hex()).write_text("")
        with pytest.raises(TierError, match="io"):
            put(store, key(1, B))


def test_erasing_a_scope_takes_all_its_files_and_nobody_elses(root: Path) -> None:
    with opened(root) as store:
        for i in range(3):
            put(store, key(i, A))
            put(store, key(i, A, b"modeltwo"), 2)
            put(store, key(i, B))
        store.discard(key(0, A), "checksum")
        assert store.erase(A, FOREVER) == (5, 8 * PAGE)
        assert [p for p in root.rglob("*") if A.hex() in p.name] == []
        assert store.usage() == {B: (3 * PAGE, 3)}
        assert store.stats().bytes == 3 * PAGE
        assert store.erase(A, FOREVER) == (0, 0)


def test_damaged_values_are_kept_apart_sixteen_at_most_and_count(root: Path) -> None:
    with opened(root, 30 * PAGE) as store:
        for i in range(20):
            put(store, key(i))
            store.discard(key(i), "checksum")
            assert store.open(key(i), FOREVER) is None
        assert len(files(root)) == 16
        assert store.stats().bytes == 16 * PAGE
        assert store.stats().corrupt == 20
        put(store, key(0))  # may be written anew
        assert get(store, key(0)) == content(key(0))
        store.discard(key(77), "checksum")
        put(store, key(50), 25)  # they go before records do
        assert store.contains(key(0))
        assert sorted(files(root).values()) == [PAGE, 25 * PAGE]


def test_files_that_vanish_are_plain_misses(root: Path) -> None:
    with opened(root, 10 * PAGE) as store:
        for i in range(8):
            put(store, key(i))
        shutil.rmtree(root / "v1" / b"modelone".hex())
        assert [get(store, key(i)) for i in range(8)] == [None] * 8
        assert store.delete([key(0)], FOREVER) == 0
        store.discard(key(1), "short")
        for i in range(20, 40):
            put(store, key(i))  # evicts rows whose files are gone
        assert store.stats().bytes == sum(files(root).values())
        assert get(store, key(39)) == content(key(39))


def test_files_and_rows_are_compared_at_start(root: Path) -> None:
    with opened(root) as store:
        for i in range(6):
            put(store, key(i))
    os.unlink(root / "v1" / f"{key(0).name}.kvr")
    os.truncate(root / "v1" / f"{key(1).name}.kvr", 100)
    moved = root / "v1" / f"{key(2).name.replace(A.hex(), B.hex())}.kvr"
    moved.parent.mkdir(parents=True)
    os.rename(root / "v1" / f"{key(2).name}.kvr", moved)
    (moved.parent / ".tmp-host-1-abc-0").write_bytes(b"x" * 99)  # of a process that is dead
    (moved.parent / "notes.txt").write_text("not ours")
    (root / "v1/damaged/not-one-of-our-names").write_text("?")
    (root / f"v1/damaged/{key(9, B).name.replace('/', '-')}-1f.bad").write_bytes(bytes(50))  # lost with the catalogue
    with opened(root) as store:
        assert store.reconciled.wait(5)
        assert store.usage() == {A: (3 * PAGE + 100, 4), B: (PAGE, 1)}
        assert store.stats().bytes == 4 * PAGE + 150
        assert not leftovers(root)
        assert (moved.parent / "notes.txt").exists()
        with opened(root) as other:  # a living process's temporary file stays
            mine = moved.parent / f".tmp-{other._parts.owners.name}-7"
            mine.write_bytes(b"x")
            with opened(root) as third:
                assert third.reconciled.wait(5)
                assert mine.exists()
        with opened(root) as fourth:
            assert fourth.reconciled.wait(5)
        assert not mine.exists()


@pytest.mark.parametrize("damage", [b"", b"garbage" * 2000, None])
def test_a_broken_catalogue_is_rebuilt_also_under_a_running_store(root: Path, damage: bytes | None) -> None:
    path = root / "v1/catalog.sqlite"

    def break_it() -> None:
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)

    with opened(root, 10 * PAGE) as store:
        for i in range(8):
            put(store, key(i))
        break_it()
        for i in range(20, 24):
            put(store, key(i))
            assert sum(files(root).values()) <= 10 * PAGE
        assert store.stats().bytes == sum(files(root).values())
    break_it()
    with opened(root, 10 * PAGE) as store:
        assert get(store, key(23)) == content(key(23))
        assert store.reconciled.wait(5)
        assert store.stats().bytes == sum(files(root).values())
        assert {i.key for i in store.scan()} >= {key(23)}


def test_a_locked_catalogue_fails_writes_only(root: Path) -> None:
    import sqlite3

    with opened(root, patience=0.2) as store:
        put(store, key(1))
        lock = sqlite3.connect(root / "v1/catalog.sqlite", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        with pytest.raises(TierError, match="busy"):
            put(store, key(2))
        assert get(store, key(1)) == content(key(1))
        assert store.delete([key(1)], FOREVER) == 1
        assert not store.contains(key(1))
        lock.execute("ROLLBACK")
        lock.close()
        put(store, key(2))
        store._parts.cleanup.retry()
        assert store.stats().bytes == sum(files(root).values()) == PAGE


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(InvalidOption, match="precious"):
        DiskBlobs(tmp_path, 100)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(InvalidOption):
        DiskBlobs(tmp_path / "precious.txt", 100)
    with pytest.raises(InvalidOption):
        DiskBlobs(tmp_path / "precious.txt" / "below", 100)
    mounted = tmp_path / "disk"
    (mounted / "lost+found").mkdir(parents=True)
    with opened(mounted):
        pass
    (mounted / "kvweave-store.json").write_text('{"format": 2}')
    with pytest.raises(InvalidOption, match="format 1"):
        DiskBlobs(mounted, 100)


def test_options_that_make_no_sense_are_refused(root: Path) -> None:
    for options in ({"policy": "lruu"}, {"free_floor": 1.0}, {"direct": "maybe"}, {"durability": "none"}):
        with pytest.raises(InvalidOption):
            DiskBlobs(root, 100, **options)
    with pytest.raises(InvalidOption):
        DiskBlobs(root, -1)
    assert not root.exists()


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "smb3", "9p", "fuse.sshfs"])
def test_network_file_systems_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(folder, "file_system", lambda path: kind)
    with pytest.raises(InvalidOption, match="network"):
        DiskBlobs(root, 100)


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    inner = os.path.realpath(tmp_path)
    mounts = [SimpleNamespace(mountpoint=m, fstype=t) for m, t in [("/", "ext4"), (inner, "nfs"), (f"{inner}x", "xfs")]]
    monkeypatch.setattr(folder.psutil, "disk_partitions", lambda all: mounts)
    assert file_system(tmp_path / "a") == file_system(tmp_path) == "nfs"
    assert file_system(Path("/elsewhere")) == "ext4"


def test_the_free_space_floor_holds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(root, free_floor=0.1) as store:
        monkeypatch.setattr(store._files, "space", lambda: (9000 * PAGE - sum(files(root).values()), 10000 * PAGE))
        put(store, key(1), 50)
        monkeypatch.setattr(store._files, "space", lambda: (1060 * PAGE - sum(files(root).values()), 10000 * PAGE))
        put(store, key(2), 8)
        put(store, key(3), 10)  # only by letting the oldest go
        assert [store.contains(key(i)) for i in (1, 2, 3)] == [False, True, True]
        with pytest.raises(Rejected, match="no_room"):
            put(store, key(4), 61)
        assert store.contains(key(3))
    with opened(root, None) as admin:
        monkeypatch.setattr(admin._files, "space", lambda: (0, 1000 * PAGE))
        with pytest.raises(Rejected, match="no_room"):  # without a capacity nothing is evicted
            put(admin, key(5))
        assert admin.contains(key(3))


def mount(*arguments: str) -> None:
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting needs the superuser")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting isn't allowed here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[None]:
    mount(*arguments, str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_read_only_folder_is_read_and_never_written(root: Path, tmp_path: Path) -> None:
    with opened(root) as store:
        put(store, key(1), 3)
        store.raise_epoch(A, 2, FOREVER)
    view = tmp_path / "view"
    view.mkdir()
    with mounted(view, "--bind", str(root)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(view)], check=True)
        check_read_only(view)
        empty = tmp_path / "view" / "v1"
        with pytest.raises(InvalidOption):
            DiskBlobs(empty / "new", 100)


def test_a_folder_that_refuses_writes_is_read_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(root) as store:
        put(store, key(1), 3)
        store.raise_epoch(A, 2, FOREVER)

    def refuse(path: str) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder, "private_file", refuse)
    check_read_only(root)
    with pytest.raises(InvalidOption):
        DiskBlobs(root.parent / "new", 100)


def check_read_only(root: Path) -> None:
    with opened(root, 10 * PAGE) as store:
        assert store.read_only
        assert get(store, key(1), 5, 2 * PAGE) == content(key(1), 3)[5 : 5 + 2 * PAGE]
        with pytest.raises(Rejected, match="read_only"):
            put(store, key(2))
        with pytest.raises(TierError):
            store.delete([key(1)], FOREVER)
        with pytest.raises(TierError):
            store.pin(key(1), time.time() + 9, "test")
        assert [(i.key, i.size) for i in store.scan()] == [(key(1), 3 * PAGE)]
        assert store.usage() == {A: (3 * PAGE, 1)}
        assert store.stats().bytes == 3 * PAGE
        assert store.epoch(A, FOREVER) == 2
        store.ping(FOREVER)
        store.discard(key(1), "checksum")
        assert store.open(key(1), FOREVER) is None


def test_a_full_file_system_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    with mounted(place, "-t", "tmpfs", "-o", "size=8m", "none"):
        with opened(place / "s", 10**9) as store:
            for i in range(200):
                with contextlib.suppress(Rejected):
                    put(store, key(i), 16)
                assert not leftovers(place / "s")
            stored = sum(store.contains(key(i)) for i in range(200))
            assert stored > 30
            assert all(get(store, key(i)) in (None, content(key(i), 16)) for i in range(200))
            assert store.stats().records == stored
            assert set(store.stats().rejected) <= {"no_room"}
            filler = place / "filler"  # somebody else takes what is left
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(PAGE)):
                    pass
            (place / "s/v1/catalog.sqlite").unlink()
        with opened(place / "s", 10**9) as store:  # no room even for a catalogue: reads go on
            assert sum(get(store, key(i)) is not None for i in range(200)) == stored
            with contextlib.suppress(Rejected, TierError):
                put(store, key(300))
            filler.unlink()
            put(store, key(301))
            assert get(store, key(301)) == content(key(301))


def test_the_cost_policy_learns_from_headers_and_hints(root: Path) -> None:
    with opened(root, 10 * PAGE, policy="cost") as store:
        for i in range(9):
            put(store, key(i), prefill_ms=0.001 if i == 4 else 1000.0, tokens=5)
        put(store, key(9), prefill_ms=1000.0)
        assert not store.contains(key(4))
    os.unlink(root / "v1/catalog.sqlite")
    with opened(root, 10 * PAGE, policy="cost") as store:
        assert store.reconciled.wait(5)
        for _ in range(100):
            if not store._parts.catalog.without_prefill(1):
                break
            time.sleep(0.02)
        assert store._parts.catalog.without_prefill(1) == []  # not records: looked at once, and not again


def test_a_long_header_tells_its_cost_too(root: Path) -> None:
    """Of a long chunk, whose header doesn't fit into the first read."""
    tokens = 3000
    identity = ChunkIdentity.of(range(tokens), [1], ModelFingerprint.of(content="m"), Scope.of("t"))
    data = torch.zeros(1, tokens, 8, dtype=torch.bfloat16)
    value = encode(ChunkRecord(identity, (data,), (data,), prefill_ms=1234.0), TextOrder(), "raw", "test")
    assert header_length(value[:FIRST_READ], len(value)) > FIRST_READ
    with opened(root) as store:
        store.put(identity.key, value, PutHints(), FOREVER)
    os.unlink(root / "v1/catalog.sqlite")
    with opened(root, policy="cost") as store:
        limit = time.monotonic() + 30
        while (entry := next(iter(store._parts.catalog.entries()), None)) is None or entry.prefill_ms is None:
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert entry.prefill_ms == 1234.0


def test_ping_and_close(root: Path) -> None:
    with opened(root) as store:
        put(store, key(1))
        store.ping(FOREVER)
        blob = store.open(key(1), FOREVER)
        store.close()
        store.close()
        assert blob is not None
        with blob.read(0, 5, FOREVER) as data:
            assert bytes(data) == content(key(1))[:5]
        with pytest.raises(TierError, match="closed"):
            put(store, key(2))
        assert list((root / "v1/owners").iterdir()) == []
        shutil.rmtree(root)
        with pytest.raises(TierError):
            store.ping(FOREVER)


def test_a_process_taken_for_dead_while_it_starts_enters_itself_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(root):
        pass
    removed: list[Path] = []
    lock = folder.lock_file

    def late(descriptor: int, patience: float) -> None:
        if not removed:
            (found,) = (root / "v1/owners").iterdir()
            found.unlink()
            removed.append(found)
        lock(descriptor, patience)

    monkeypatch.setattr(folder, "lock_file", late)
    with opened(root) as store, opened(root) as other:
        assert store._parts.owners.name not in removed[0].name
        assert other._parts.owners.alive(store._parts.owners.name)
        assert not other._parts.owners.alive(removed[0].stem)
