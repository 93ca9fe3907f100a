"""Tiers composed into one store, against a dict; write-behind; what passes between processes. Media are in memory here."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvweave.config import Tiers
from kvweave.core.keys import ChunkIdentity, ModelFingerprint, Scope
from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.errors import InvalidOption, LoadFailed, PinQuotaExceeded
from kvweave.store import erasure, tiered, write_behind
from kvweave.store import medium as medium_module
from kvweave.store.base import MISS_REASONS, ChunkRecord, Miss, Reach, StoredChunk, TierError
from kvweave.store.compose import open_store
from kvweave.store.disk import DiskBlobs
from kvweave.store.guard import Guarded
from kvweave.store.host import HostStore
from kvweave.store.io_pool import IOPool
from kvweave.store.medium import Medium
from kvweave.store.memory_blobs import MemoryBlobs
from kvweave.store.tiered import TieredStore, TierOptions
from kvweave.store.write_behind import WriteBehind
from tests.store.media import FaultyBlobs, RecordingBlobs, always, random_faults

LAYOUT = KVLayout((LayerSpec(4, 2, 16, 8), LayerSpec(4, 1, 8, 8), LayerSpec(4, 2, 16, 8)), torch.bfloat16)
MODEL = ModelFingerprint.of(content="m")
TOKENS = 70
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _quick_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs are looked up anew at once, and receipts don't wait."""
    monkeypatch.setattr(erasure, "EPOCH_TTL", 0.0)
    monkeypatch.setattr(erasure, "_RETRY", 0.05)


def record(number: int, scope: Scope, model: ModelFingerprint = MODEL) -> ChunkRecord:
    """Content that follows from the key."""
    generator = torch.Generator().manual_seed(number)
    identity = ChunkIdentity.of([*range(TOKENS - 1), number], [1], model, scope)
    shapes = [((s.num_kv_heads, TOKENS, s.key_dim), (s.num_kv_heads, TOKENS, s.value_dim)) for s in LAYOUT.layers]
    keys, values = (tuple(torch.randn(shape[i], generator=generator).bfloat16() for shape in shapes) for i in (0, 1))
    return ChunkRecord(identity, keys, values, 5.0)


SIZE = record(0, Scope.of("t")).num_bytes


def store_of(*media: object, host: int = 0, **options: object) -> TieredStore:
    return TieredStore(
        HostStore(host),
        media,  # type: ignore[arg-type]
        layout=LAYOUT,
        options=TierOptions(threads=2, lookup_timeout=1.0, **options),  # type: ignore[arg-type]
    )


def read(chunk: StoredChunk, tokens: torch.Tensor, first_layer: int = 0, timeout: float = 5.0) -> ChunkRecord:
    reader = chunk.read(tokens, first_layer, 1, timeout)
    kv = [reader.layer(layer) for layer in range(first_layer, len(LAYOUT.layers))]
    return ChunkRecord(chunk.identity, tuple(k for k, _ in kv), tuple(v for _, v in kv))


def equal(a: ChunkRecord, b: ChunkRecord, tokens: torch.Tensor, first_layer: int = 0) -> bool:
    pairs = [*zip(a.keys, b.keys[first_layer:], strict=True), *zip(a.values, b.values[first_layer:], strict=True)]
    return all(torch.equal(x, y[:, tokens]) for x, y in pairs)


class Tiered(RuleBasedStateMachine):
    """Host of three records over two media, the second of which fails at random."""

    NUMBERS = st.integers(0, 6)

    @initialize(seed=st.integers(0, 1000), queue=st.sampled_from([0, 10 * SIZE]))
    def start(self, seed: int, queue: int) -> None:
        self.near, self.far = MemoryBlobs(), FaultyBlobs(RenamedBlobs("far"), random_faults(seed, 0.2))
        self.queue = queue
        self.open()
        self.stored: set[int] = set()
        self.epoch = 0

    def open(self) -> None:
        self.store = store_of(self.near, self.far, host=3 * SIZE, write_queue=self.queue)

    def wanted(self, number: int) -> ChunkRecord:
        return record(number, self.store.scope("t"))

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        assert self.store.put(self.wanted(number), wait=True)
        assert self.store.contains(self.wanted(number).identity)
        self.stored.add(number)

    @rule(numbers=st.lists(NUMBERS, max_size=4, unique=True), data=st.data())
    def find(self, numbers: list[int], data: st.DataObject) -> None:
        self.store.flush(10)
        records = [self.wanted(n) for n in numbers]
        for number, true, found in zip(numbers, records, self.store.find([r.identity for r in records]), strict=True):
            if isinstance(found, Miss):
                assert found.reason in MISS_REASONS
                assert number not in self.stored, "the near medium never fails"
                continue
            assert number in self.stored
            tokens = torch.tensor(sorted(data.draw(st.sets(st.integers(0, TOKENS - 1), min_size=1))))
            layer = data.draw(st.integers(0, len(LAYOUT.layers) - 1))
            assert equal(read(found, tokens, layer), true, tokens, layer)
            found.close()

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        self.store.remove([self.wanted(number).key])
        self.far.blobs.delete([self.wanted(number).key], 0.0)  # where the medium failed to
        self.stored.discard(number)

    @rule()
    def erase(self) -> None:
        self.store.erase("t")
        self.stored.clear()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def nothing_is_held(self) -> None:
        if hasattr(self, "store"):
            assert self.store.staging.used == 0
            assert self.store.stats().bytes <= 3 * SIZE

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class RenamedBlobs(MemoryBlobs):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


TestTiered = Tiered.TestCase
TestTiered.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("first_layer", [0, 1, 2])
@pytest.mark.parametrize("min_read", [0, 10_000, 10**9])
@pytest.mark.parametrize("tokens", [[0], [69], list(range(70)), [0, 1, 64, 69], list(range(3, 40)), [31, 32]])
def test_any_rows_of_any_layers(tokens: list[int], min_read: int, first_layer: int) -> None:
    """Partial reads equal the slice of a full one, one layer at a time or several in one read."""

    class Grouping(MemoryBlobs):
        pass

    Grouping.min_read = min_read
    medium = RecordingBlobs(Grouping())
    store, true = store_of(medium), record(1, Scope.of("t"))
    store.put(true, wait=True)
    assert store.flush(5)
    (found,) = store.find([true.identity])
    assert not isinstance(found, Miss)
    wanted = torch.tensor(tokens)
    assert equal(read(found, wanted, first_layer), true, wanted, first_layer)
    found.close()
    assert medium.opened == medium.closed
    sections = [c for c in medium.of("read") if c.offset]
    layers = len(LAYOUT.layers) - first_layer
    assert len(sections) == {0: layers, 10_000: len(sections), 10**9: 1}[min_read] or len(tokens) == 4


def test_the_order_of_rows_is_layout_and_not_identity() -> None:
    class Shuffled:
        name = "rank:test/1"

        def order(self, record: ChunkRecord) -> np.ndarray:
            return np.random.default_rng(0).permutation(TOKENS)

    medium, true = MemoryBlobs(), record(1, Scope.of("t"))
    writer = TieredStore(HostStore(0), [medium], layout=LAYOUT, ranking=Shuffled())
    writer.put(true, wait=True)
    assert writer.flush(5)
    (found,) = store_of(medium).find([true.identity])
    assert not isinstance(found, Miss)
    tokens = torch.tensor([3, 9, 33, 68])
    assert equal(read(found, tokens), true, tokens)


@pytest.mark.parametrize(
    ("change", "reason"),
    [("model", "absent"), ("scope", "absent"), ("tokens", "absent"), ("layout", "layout")],
)
def test_another_identity_is_a_miss(change: str, reason: str) -> None:
    """Public failures 7 and 26: other weights and other tenants miss, the same tenant hits."""
    medium, mine = MemoryBlobs(), record(1, Scope.of("t"))
    store = store_of(medium)
    store.put(mine, wait=True)
    assert store.flush(5)
    wanted = {
        "model": record(1, Scope.of("t"), ModelFingerprint.of(content="n")),
        "scope": record(1, Scope.of("u")),
        "tokens": record(2, Scope.of("t")),
        "layout": mine,
    }[change]
    layout = LAYOUT if change != "layout" else KVLayout(LAYOUT.layers, torch.float16)
    reader = TieredStore(HostStore(0), [medium], layout=layout)
    (missed,) = reader.find([wanted.identity])
    assert isinstance(missed, Miss)
    assert missed.reason == reason
    if change != "layout":
        (hit,) = store_of(medium).find([mine.identity])
        assert not isinstance(hit, Miss)


def test_a_record_under_a_wrong_name_is_found_out_and_thrown_away() -> None:
    """Public failures 1 and 17: one miss with a reason, after that it is simply absent."""
    medium, a, b = MemoryBlobs(), record(1, Scope.of("t")), record(2, Scope.of("t"))
    store = store_of(medium)
    store.put(a, wait=True)
    assert store.flush(5)
    medium._values[b.key] = medium._values[a.key]
    assert store.find([b.identity]) == [Miss("key", "memory")]
    assert store.find([b.identity]) == [Miss("absent", "host")]
    assert store.tiers[0].counters.misses == {"key": 1, "absent": 1}


def test_eight_threads_read_their_own_content() -> None:
    """Public failure 1: content follows from the key; a small host tier evicts all the time."""
    medium, store = FaultyBlobs(MemoryBlobs()), None
    store = store_of(medium, host=2 * SIZE)
    records = [record(i, Scope.of("t")) for i in range(12)]
    for one in records:
        store.put(one, wait=True)
    assert store.flush(5)
    medium.choose = random_faults(1, 0.3)
    wrong: list[int] = []
    tokens = torch.arange(TOKENS)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            number = int(rng.integers(12))
            (found,) = store.find([records[number].identity])
            if isinstance(found, Miss):
                store.put(records[number])
                continue
            try:
                if not equal(read(found, tokens), records[number], tokens):
                    wrong.append(number)
            except LoadFailed:
                store.put(records[number])
            finally:
                found.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert store.tiers[0].counters.loads.total() > 20


def test_a_dead_tier_neither_fails_nor_hides_the_next() -> None:
    dead, alive = FaultyBlobs(RenamedBlobs("dead"), always("io")), MemoryBlobs()
    store, true = store_of(dead, alive), record(1, Scope.of("t"))
    assert store.put(true, wait=True)
    assert store.flush(5)
    found, other = store.find([true.identity, record(2, Scope.of("t")).identity])
    assert not isinstance(found, Miss)
    assert found.tier == "memory"
    assert other == Miss("io", "dead"), "a failure tells more than an absence"
    assert store.tiers[0].counters.puts == {"io": 1}


def test_a_hanging_tier_costs_one_deadline() -> None:
    slow = FaultyBlobs(MemoryBlobs(), always(30.0, "open", "epoch"))
    store = TieredStore(HostStore(0), [slow], layout=LAYOUT, options=TierOptions(lookup_timeout=0.2, threads=2))
    wanted = [record(i, Scope.of("t")).identity for i in range(6)]
    start = time.monotonic()
    assert store.find(wanted) == [Miss("deadline", "memory")] * 6
    assert time.monotonic() - start < 1.0


def test_erasure_of_one_tenant_by_one_process_reaches_another() -> None:
    medium = MemoryBlobs()
    a, b = store_of(medium, host=10 * SIZE), store_of(medium, host=10 * SIZE)
    assert a.scope("t") == b.scope("t")
    mine, theirs = record(1, a.scope("t")), record(1, a.scope("u"))
    for store in (a, b):
        for one in (mine, theirs):
            store.put(one, wait=True)
        assert store.flush(5)
    receipt = a.erase("t")
    assert (receipt.tiers["host"].records, receipt.tiers["memory"].records, receipt.pending) == (1, 1, ())
    assert receipt.digest == receipt.to_json()["digest"]
    assert b.scope("t") != Scope.of("t"), "the other process has a new key for the tenant"
    assert b.host.stats().records == 1, "and has forgotten what it held"
    assert b.scope("u") == Scope.of("u")
    (left,) = b.find([theirs.identity])
    assert not isinstance(left, Miss)
    again = a.erase("t")
    assert again.tiers["memory"].records == 0
    assert again.epoch > receipt.epoch


def test_erasure_with_an_unreachable_tier_is_pending_and_finished_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public failure 27: unreachable at once, deleted when the tier is back."""
    monkeypatch.setattr(erasure, "_RETRY", 0.05)
    near, far = MemoryBlobs(), FaultyBlobs(RenamedBlobs("far"))
    store = store_of(near, far)
    one = record(1, store.scope("t"))
    store.put(one, wait=True)
    assert store.flush(5)
    far.choose = always("io")
    receipt = store.erase("t")
    assert receipt.pending == ("far",)
    assert receipt.tiers["far"].state == "unreachable"
    assert store.find([record(1, store.scope("t")).identity])[0] == Miss("io", "far")
    far.choose = lambda operation: None
    deadline = time.monotonic() + 5
    while len(list(far.scan())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(far.scan()) == []
    assert far.epoch(one.key.scope, time.monotonic() + 1) == receipt.epoch
    store.close()


def test_a_write_of_before_an_erasure_doesnt_come_back() -> None:
    gate = threading.Event()

    class Slow(MemoryBlobs):
        def put(self, *args: object) -> None:
            gate.wait(5)
            super().put(*args)  # type: ignore[arg-type]

    medium = Slow()
    store = store_of(medium)
    first, second = record(1, store.scope("t")), record(2, store.scope("t"))
    store.put(first)
    store.put(second)
    eraser = threading.Thread(target=store.erase, args=("t",))
    eraser.start()
    time.sleep(0.05)
    gate.set()
    eraser.join(5)
    assert store.flush(5)
    assert list(medium.scan()) == []


def test_a_full_queue_drops_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    gate, written = threading.Event(), []

    def write(one: ChunkRecord, epoch: int) -> None:
        gate.wait(5)
        written.append(one.identity.token_ids[-1])

    queue, scope = WriteBehind(write, 2 * SIZE, threads=1), Scope.of("t")
    assert queue.offer(record(0, scope), 0)
    deadline = time.monotonic() + 5
    while queue._entries and time.monotonic() < deadline:
        time.sleep(0.01)  # until the thread has taken it
    assert queue.offer(record(2, scope), 0)
    assert queue.offer(record(3, scope), 0)
    assert queue.offer(record(3, scope), 0), "it is queued already"
    assert not queue.offer(record(1, scope), 0), "the newest has to go"
    assert not queue.offer(record(4, scope), 0)
    assert queue.dropped == {"full": 2}
    assert caplog.text.count("was not written") == 2
    gate.set()
    assert queue.close(5)
    assert written == [0, 2, 3]
    assert not queue.offer(record(5, scope), 0)
    assert queue.dropped["closed"] == 1


def test_who_can_wait_gets_room_and_an_error_doesnt_end_the_writer() -> None:
    written = []

    def write(one: ChunkRecord, epoch: int) -> None:
        if one.identity.token_ids[-1] == 2:
            raise RuntimeError("a bug")
        time.sleep(0.01)
        written.append(one.identity.token_ids[-1])

    queue = WriteBehind(write, SIZE, threads=1)
    assert all(queue.offer(record(i, Scope.of("t")), 0, wait=True) for i in range(6))
    assert queue.close(5)
    assert written == [0, 1, 3, 4, 5]
    assert queue.dropped == {"error": 1}


def test_what_host_memory_has_and_a_tier_lacks_is_copied_on_demand() -> None:
    medium = FaultyBlobs(MemoryBlobs(), always("io", "put"))
    store, one = store_of(medium, host=10 * SIZE), record(1, Scope.of("t"))
    store.put(one)
    assert store.flush(5)
    assert list(medium.scan()) == []
    medium.choose = lambda operation: None
    assert store.keep(one.identity)
    assert store.flush(5)
    assert [info.key for info in medium.scan()] == [one.key]
    assert not store.keep(record(2, Scope.of("t")).identity)


def test_two_who_erase_with_what_they_knew_before_both_raise_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third process stores between them: the second receipt holds for that as well."""
    monkeypatch.setattr(erasure, "EPOCH_TTL", 0.05)
    medium = MemoryBlobs()
    a, b, c = (store_of(medium, host=10 * SIZE) for _ in range(3))
    b.scope("t")
    first = a.erase("t")
    one = record(1, c.scope("t"))
    c.put(one, wait=True)
    assert c.flush(5)
    failing = FaultyBlobs(medium)
    b._eraser._media = [Medium(failing, IOPool(1))]
    failing.choose = always("io", "epoch")  # b can't even see that a did
    second = b.erase("t")
    assert second.epoch > first.epoch
    time.sleep(0.06)
    assert c.scope("t").epoch == second.epoch
    assert c.host.stats().records == 0


def test_a_tier_that_cant_tell_the_epoch_isnt_used() -> None:
    """It may hold what was erased and couldn't be removed."""
    medium = FaultyBlobs(MemoryBlobs())
    store, one = store_of(medium), record(1, Scope.of("t"))
    store.put(one, wait=True)
    assert store.flush(5)
    other = store_of(medium)
    medium.choose = always("busy", "epoch")
    other.scope("t")
    assert other.find([one.identity]) == [Miss("busy", "memory")]
    medium.choose = lambda operation: None
    other.scope("t")
    (hit,) = other.find([one.identity])
    assert not isinstance(hit, Miss)


def test_a_tier_that_missed_an_erasure_is_told_when_it_is_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by another process, which knows of it from the other tier alone."""
    monkeypatch.setattr(erasure, "_RETRY", 0.02)
    near, far = MemoryBlobs(), FaultyBlobs(RenamedBlobs("far"))
    store = store_of(near, far)
    store.put(record(1, store.scope("t")), wait=True)
    assert store.flush(5)
    far.choose = always("io")
    receipt = store.erase("t")
    assert receipt.pending == ("far",)
    store.close()
    far.choose = lambda operation: None
    later = store_of(near, far)
    assert later.scope("t").epoch == receipt.epoch
    deadline = time.monotonic() + 5
    while list(far.scan()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(far.scan()) == []
    assert far.epoch(Scope.of("t").tag, time.monotonic() + 1) == receipt.epoch


@pytest.mark.parametrize("operation", ["open", "read", "put", "contains", "epoch", "erase"])
def test_what_a_medium_raises_ends_nothing(operation: str) -> None:
    """A bug in a medium, or an answer that makes no sense to its client."""

    class Broken(FaultyBlobs):
        def before(self, name: str, deadline: float) -> object:  # type: ignore[override]
            if name == operation and self.broken:
                raise RuntimeError("a bug")
            return None

    medium = Broken(MemoryBlobs())
    medium.broken = False  # type: ignore[attr-defined]
    store, one = store_of(medium), record(1, Scope.of("t"))
    if operation != "put":
        store.put(one, wait=True)
        assert store.flush(5)
    medium.broken = True  # type: ignore[attr-defined]
    store.put(record(2, Scope.of("t")), wait=True)
    assert store.flush(5)
    store.scope("t")
    (found,) = store.find([one.identity])
    if operation in ("open", "read", "epoch"):
        assert found == Miss("io", "memory")
    receipt = store.erase("t")
    assert (receipt.pending == ("memory",)) == (operation == "erase")
    store.close()


def test_a_write_that_hangs_holds_up_neither_erasure_nor_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "_CANCEL", 0.1)
    gate, medium = threading.Event(), FaultyBlobs(MemoryBlobs())
    put = medium.put
    medium.put = lambda *args: (gate.wait(10), put(*args))[1]  # type: ignore[method-assign]
    store = store_of(medium, write_queue=2 * SIZE)
    for number in range(3):
        store.put(record(number, store.scope("t")))
    start = time.monotonic()
    store.erase("t")
    assert time.monotonic() - start < 5
    store.put(record(5, store.scope("t")))
    gate.set()
    store.wait_for_room()
    assert store.flush(5)
    assert [info.key for info in medium.scan()] == [record(5, store.scope("t")).key], "what was erased meanwhile was refused"


def test_a_closed_store_is_freed() -> None:
    """What is registered for the end of the program doesn't keep it."""
    store = store_of(MemoryBlobs(), host=10 * SIZE)
    store.put(record(1, Scope.of("t")), wait=True)
    store.close()
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None


def test_what_was_computed_before_an_erasure_is_stored_nowhere() -> None:
    medium = MemoryBlobs()
    store = store_of(medium, host=10 * SIZE)
    early = record(1, store.scope("t"))
    store.erase("t")
    store.scope("t")
    assert store.put(early, wait=True)  # queued, and refused by the medium
    assert store.flush(5)
    assert list(medium.scan()) == []
    assert store.host.stats().records == 0
    assert store.tiers[0].counters.puts == {"stale": 1}


class Hung:
    """Calls of some operations stand still until ``opened``."""

    def __init__(self, *operations: str) -> None:
        self.opened = threading.Event()
        self._operations = operations

    def __call__(self, operation: str) -> None:
        if operation in self._operations:
            self.opened.wait(30)


def test_a_hung_medium_costs_one_deadline_and_is_left_alone_until_it_answers() -> None:
    medium = FaultyBlobs(MemoryBlobs())
    store = store_of(medium)
    scope = store.scope("t")
    one = record(1, scope)
    store.put(one, wait=True)
    assert store.flush(5)
    medium.choose = hung = Hung("open")  # type: ignore[assignment]
    reasons = []
    for _ in range(3):
        (missed,) = store.find([one.identity])
        assert isinstance(missed, Miss)
        reasons.append(missed.reason)
    assert reasons == ["deadline", "breaker", "breaker"]
    hung.opened.set()
    found = wait_for(lambda: [f for f in store.find([one.identity]) if not isinstance(f, Miss)])
    found[0].close()
    store.close()


def test_a_hung_medium_takes_no_threads_of_another() -> None:
    near, far = RenamedBlobs("near"), FaultyBlobs(RenamedBlobs("far"))
    store = store_of(near, far)
    scope = store.scope("t")
    records = [record(i, scope) for i in range(8)]
    for one in records:
        store.put(one, wait=True)
    assert store.flush(5)
    for one in records[4:]:
        near.delete([one.key], 0.0)
    far.choose = hung = Hung("open")  # type: ignore[assignment]
    found = store.find([one.identity for one in records])
    assert [not isinstance(f, Miss) for f in found] == [True] * 4 + [False] * 4
    again = store.find([one.identity for one in records[:4]])
    assert not any(isinstance(f, Miss) for f in again)
    hung.opened.set()
    for f in (*found, *again):
        if not isinstance(f, Miss):
            f.close()
    store.close()


def test_a_scope_is_told_by_its_deadline_though_a_medium_hangs() -> None:
    medium = FaultyBlobs(MemoryBlobs())
    store = store_of(medium, host=10 * SIZE)
    one = record(1, store.scope("t"))
    store.put(one, wait=True)
    assert store.flush(5)
    medium.choose = hung = Hung("epoch")  # type: ignore[assignment]
    assert store.scope("t").epoch == 0
    (found,) = store.find([one.identity])
    assert not isinstance(found, Miss), "host memory needs no medium"
    hung.opened.set()
    store.close()


def test_a_tier_that_was_added_later_is_filled_from_the_others() -> None:
    old, new = RenamedBlobs("old"), RenamedBlobs("new")
    before = store_of(old)
    one = record(1, before.scope("t"))
    before.put(one, wait=True)
    before.close()
    store = store_of(old, new)
    assert store.keep(one.identity)
    assert store.flush(10)
    assert new.contains(one.key, 0.0)
    alone = store_of(new)
    (found,) = alone.find([one.identity])
    assert not isinstance(found, Miss)
    assert equal(read(found, torch.arange(TOKENS)), one, torch.arange(TOKENS))
    found.close()


def test_every_record_is_copied_to_a_tier_that_was_added_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and however little room the write queue has."""
    monkeypatch.setattr(tiered, "_MOVES", 2)
    old, new = RenamedBlobs("old"), FaultyBlobs(RenamedBlobs("new"), always(0.002, "put"))
    before = store_of(old)
    records = [record(i, before.scope("t")) for i in range(12)]
    for one in records:
        before.put(one, wait=True)
    before.close()
    store = store_of(old, new, write_queue=2 * SIZE)
    assert all(store.keep(one.identity, wait=True) for one in records)
    assert store.flush(10)
    assert all(new.contains(one.key, 0.0) for one in records)
    assert store.tier_stats()["old"].counters.promotions == {}, "nothing moved up"


@pytest.mark.parametrize(("first_layer", "rows"), [(0, TOKENS), (1, TOKENS), (2, TOKENS), (1, TOKENS // 2)])
def test_promotion_reads_no_layer_twice(first_layer: int, rows: int) -> None:
    """A load of all rows from a layer on (CacheBlend's) leaves only the layers below it to be read."""
    medium = RecordingBlobs(MemoryBlobs())
    writer = store_of(medium, least_job=1)
    one = record(1, writer.scope("t"))
    writer.put(one, wait=True)
    writer.close()
    store = store_of(medium, least_job=1, host=10 * SIZE)
    (found,) = store.find([one.identity])
    assert not isinstance(found, Miss)
    read(found, torch.arange(rows), first_layer)
    found.close()
    assert store.flush(10)
    (held,) = store.find([one.identity])
    assert not isinstance(held, Miss)
    assert held.tier == "host"
    assert equal(read(held, torch.arange(TOKENS)), one, torch.arange(TOKENS))
    sections = [c.bytes for c in medium.of("read") if c.offset]
    whole = one.num_bytes - 4 * TOKENS
    layers = len(LAYOUT.layers)
    assert len(sections) == (layers if rows == TOKENS else layers + layers - first_layer)
    assert (sum(sections) == whole) == (rows == TOKENS)


def test_saved_prefill_is_that_of_what_was_loaded() -> None:
    store = store_of(MemoryBlobs())
    one = record(1, store.scope("t"))
    store.put(one, wait=True)
    assert store.flush(5)
    saved = []
    for tokens in (torch.arange(TOKENS), torch.arange(TOKENS // 2)):
        (found,) = store.find([one.identity])
        assert not isinstance(found, Miss)
        before = store.tier_stats()["memory"].counters
        read(found, tokens)
        after = store.tier_stats()["memory"].counters
        seconds = after.load_seconds - before.load_seconds
        saved.append(after.saved_seconds + after.lost_seconds - before.saved_seconds - before.lost_seconds)
        assert after.rows_read - before.rows_read <= TOKENS * len(LAYOUT.layers)
        assert saved[-1] <= 5e-3 + seconds
        found.close()


@pytest.mark.parametrize("tiers", ["all", "memory"])
def test_what_is_for_memory_alone_goes_to_no_other_tier(tiers: Reach) -> None:
    medium = MemoryBlobs()
    store = store_of(medium, host=10 * SIZE)
    one = record(1, store.scope("t"))
    assert store.put(one, wait=True, tiers=tiers)
    assert store.keep(one.identity, tiers=tiers)
    assert store.flush(5)
    assert medium.contains(one.key, 0.0) == (tiers == "all")
    assert not store_of(medium).put(one, tiers="memory"), "there is no room in memory, and no other tier is meant"


def test_an_expired_record_is_a_miss_in_every_tier_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    medium, now = MemoryBlobs(), time.time()
    store = store_of(medium, host=10 * SIZE)
    one = record(1, store.scope("t"))
    store.put(one, wait=True, expires=now + 100)
    assert store.flush(5)
    store.host.remove([one.key])
    (found,) = store.find([one.identity])
    assert not isinstance(found, Miss)
    read(found, torch.arange(TOKENS))  # and moves up, with its end
    found.close()
    assert store.host.contains(one.identity)
    monkeypatch.setattr(time, "time", lambda: now + 101)
    assert not store.contains(one.identity)
    assert not store.keep(one.identity)
    assert store.find([one.identity]) == [Miss("expired", "host")]
    assert store.tiers[0].counters.misses["expired"] == 1
    assert list(medium.scan()) == []
    assert store.put(one, wait=True)
    assert store.flush(5)
    assert store_of(medium).contains(one.identity)


def test_pins_reach_every_tier_that_evicts(tmp_path: Path) -> None:
    disk = Guarded(DiskBlobs(tmp_path, 2**20, free_floor=0.0), attempts=1)
    store = store_of(MemoryBlobs(), disk, host=4 * SIZE)
    one, two, gone = (record(i, store.scope("t")) for i in (1, 2, 3))
    for each in (one, two):
        store.put(each, wait=True)
    assert store.flush(5)
    store.host.remove([two.key])
    until = time.time() + 1000
    assert store.pin([one.key, two.key, gone.key], until) == {one.key, two.key}
    assert {i.key for i in disk.scan() if i.pinned_until == until} == {one.key, two.key}
    assert store.pinned_bytes(one.key.scope) == store.pinned_bytes() == SIZE
    for number in range(10, 20):
        store.put(record(number, store.scope("t")), wait=True)
    assert store.host.contains(one.identity)
    assert store.unpin([one.key, two.key]) == {one.key, two.key}
    assert store.unpin([one.key, two.key]) == set()
    with pytest.raises(InvalidOption):
        store.pin([one.key], time.time() - 1)
    store.close()


def test_a_pin_that_fits_nowhere_is_refused() -> None:
    store = store_of(MemoryBlobs(), host=int(1.5 * SIZE))
    one = record(1, store.scope("t"))
    store.put(one)
    with pytest.raises(PinQuotaExceeded):
        store.pin([one.key], time.time() + 1000)
    assert store.pinned_bytes() == 0


def test_nobody_waits_for_room_behind_a_write_that_hangs() -> None:
    opened = threading.Event()
    one, two, three = (record(i, Scope.of("t")) for i in (1, 2, 3))
    begun = threading.Event()

    def hang(record: ChunkRecord, epoch: int) -> None:
        begun.set()
        opened.wait(30)

    behind = WriteBehind(hang, SIZE, threads=1, patience=0.1)
    assert behind.offer(one, 0)
    assert begun.wait(30)
    assert behind.offer(two, 0)
    behind.wait_for_room()
    assert not behind.offer(three, 0, wait=True)
    assert not behind.flush()
    assert behind.dropped == {"stalled": 1}
    opened.set()
    wait_for(behind.flush)
    assert behind.offer(three, 0, wait=True), "it goes on when the medium does"
    assert behind.close(10)


def test_a_store_over_a_medium_that_hangs_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium_module, "_CLOSE", 0.05)
    hung = threading.Event()

    class Hanging(MemoryBlobs):
        def close(self) -> None:
            hung.wait(30)

    store_of(Hanging()).close()
    hung.set()


@pytest.mark.parametrize("fails", ["raise_epoch", "erase"])
def test_an_erasure_a_tier_was_not_told_of_is_repeated_by_the_next_engine(fails: str, tmp_path: Path) -> None:
    """The only tier fails while a tenant is erased, and the program ends before it is well again."""
    medium = FaultyBlobs(MemoryBlobs())
    notes = {"memory": tmp_path / "notes"}
    first = store_of(medium, notes=notes)
    old = record(1, first.scope("t"))
    first.put(old, wait=True)
    assert first.flush(5)
    medium.choose = always("io", fails)
    receipt = first.erase("t")
    assert receipt.pending == ("memory",)
    assert "repeat" not in str(receipt.tiers["memory"].error)
    first.close()
    assert list(medium.scan())

    medium.choose = always("io")
    second = store_of(medium, notes=notes)
    assert second.scope("t").epoch == receipt.epoch, "known at once, though the tier can't be asked"
    assert second.pending_erasures == 1
    second.close()

    medium.choose = lambda operation: None
    third = store_of(medium, notes=notes)
    wait_for(lambda: not third.pending_erasures)
    assert list(medium.scan()) == []
    assert medium.epoch(old.key.scope, time.monotonic() + 1) == receipt.epoch
    third.close()
    assert store_of(medium, notes=notes).pending_erasures == 0, "nothing is noted any more"


def test_a_receipt_says_when_an_erasure_cannot_be_noted(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a folder")
    for notes in ({}, {"memory": tmp_path / "notes"}):
        store = store_of(FaultyBlobs(MemoryBlobs(), always("io")), notes=notes)
        assert "repeat it after a restart" in str(store.erase("t").tiers["memory"].error)


def test_the_home_keeps_what_a_tier_was_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DiskBlobs, scope: bytes, epoch: int, deadline: float) -> None:
        raise TierError("io", "read-only for a while")

    home, tiers = tmp_path / "home", Tiers(disk=tmp_path / "store")
    store = open_store(0, tiers, LAYOUT, home)
    store.put(record(1, store.scope("t")), wait=True)
    with monkeypatch.context() as broken:
        broken.setattr(DiskBlobs, "raise_epoch", fail)
        assert store.erase("t").pending == ("disk",)
        store.close()
    elsewhere = open_store(0, Tiers(disk=tmp_path / "other"), LAYOUT, home)
    assert elsewhere.pending_erasures == 0, "another folder has its own notes"
    elsewhere.close()
    store = open_store(0, tiers, LAYOUT, home)
    wait_for(lambda: not store.pending_erasures)
    assert not list((tmp_path / "store").rglob("*.kvr"))
    store.close()


def wait_for(what: Callable[[], T]) -> T:
    deadline = time.monotonic() + 30
    while not (value := what()):
        assert time.monotonic() < deadline
    return value
