"""The metrics of a store say what was done with it, in the format of Prometheus, and name nobody."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from kvweave.core.keys import ChunkIdentity, ModelFingerprint, Scope
from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.store import erasure, metrics
from kvweave.store.base import MISS_REASONS, ChunkRecord, Miss, StoredChunk, TierError
from kvweave.store.disk import DiskBlobs
from kvweave.store.eviction import Quota
from kvweave.store.guard import Guarded
from kvweave.store.host import HostStore
from kvweave.store.memory_blobs import MemoryBlobs
from kvweave.store.metrics import BREAKER_STATES, DROPS, REFUSALS, render
from kvweave.store.record_tier import BOUNDS, Times
from kvweave.store.tiered import TieredStore, TierOptions
from tests.store.media import FaultyBlobs, always

LAYOUT = KVLayout((LayerSpec(4, 2, 16, 8), LayerSpec(4, 1, 8, 8)), torch.bfloat16)
MODEL = ModelFingerprint.of(content="secret model")
TOKENS = 70
LABELS = {"tier", "result", "reason", "kind", "field", "state", "le"}
VALUES = {"ok", "hit", "absent", "dropped", "refused", "host", "disk", "memory", *MISS_REASONS, *REFUSALS, *DROPS}
VALUES |= {*BREAKER_STATES, "full", "partial", "capacity"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def record(number: int, tenant: str = "ada") -> ChunkRecord:
    generator = torch.Generator().manual_seed(number)
    identity = ChunkIdentity.of([*range(TOKENS - 1), number], [1], MODEL, Scope.of(tenant))
    shapes = [((s.num_kv_heads, TOKENS, s.key_dim), (s.num_kv_heads, TOKENS, s.value_dim)) for s in LAYOUT.layers]
    keys, values = (tuple(torch.randn(shape[i], generator=generator).bfloat16() for shape in shapes) for i in (0, 1))
    return ChunkRecord(identity, keys, values, 60_000.0)


@dataclass
class Scraped:
    samples: Samples
    types: dict[str, str]

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples.get((f"kvweave_store_{name}", frozenset(labels.items())), 0.0)

    def sum(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(v for (n, have), v in self.samples.items() if n == f"kvweave_store_{name}" and wanted <= have)


def scrape(store: TieredStore) -> Scraped:
    samples: Samples = {}
    types = {}
    for family in text_string_to_metric_families(render(store)):
        types[family.name] = family.type
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
            assert set(sample.labels) <= LABELS, sample
            assert {v for k, v in sample.labels.items() if k != "le"} <= VALUES, sample
    return Scraped(samples, types)


def read(chunk: StoredChunk) -> None:
    reader = chunk.read(torch.arange(TOKENS), 0, 1, 10.0)
    for layer in range(len(LAYOUT.layers)):
        reader.layer(layer)
    chunk.close()


@pytest.fixture(autouse=True)
def _quick_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "EPOCH_TTL", 0.0)


@pytest.fixture
def far() -> FaultyBlobs:
    return FaultyBlobs(MemoryBlobs())


@pytest.fixture
def store(tmp_path: Path, far: FaultyBlobs) -> Iterator[TieredStore]:
    media = [DiskBlobs(tmp_path / "store", 2**26), Guarded(far, attempts=1)]
    opened = TieredStore(HostStore(0), media, layout=LAYOUT, options=TierOptions(threads=2))
    yield opened
    opened.close()


def test_an_idle_store(store: TieredStore) -> None:
    at = scrape(store)
    for tier in ("host", "disk", "memory"):
        assert at("tier_up", tier=tier) == 1
        assert at.sum("lookups_total", tier=tier) == 0
    assert at("capacity_bytes", tier="disk") == 2**26
    assert at("capacity_bytes", tier="host") == 0
    assert at("free_bytes", tier="disk") > 0
    assert at("staging_capacity_bytes") == store.options.staging
    assert at.types["kvweave_store_lookups"] == "counter"
    assert at.types["kvweave_store_load_seconds"] == "histogram"
    assert at.types["kvweave_store_tier_up"] == "gauge"


def test_counts_are_those_of_what_was_done(store: TieredStore, tmp_path: Path) -> None:
    records = [record(i) for i in range(3)]
    for one in records:
        assert store.put(one, wait=True)
    assert store.flush(10)
    at = scrape(store)
    size = sum(p.stat().st_size for p in tmp_path.glob("store/v1/*/*/*/*.kvr"))
    for tier in ("disk", "memory"):
        assert at("puts_total", tier=tier, result="ok") == 3
        assert at("put_bytes_total", tier=tier) == size
        assert at("put_seconds_count", tier=tier) == at("put_seconds_bucket", tier=tier, le="+Inf") == 3
        assert at("write_queue_records", tier=tier) == at("write_queue_bytes", tier=tier) == 0
    assert (at("records", tier="disk"), at("bytes", tier="disk")) == (3, size)

    found = store.find([*(r.identity for r in records), record(7).identity])
    assert isinstance(found[3], Miss)
    for one in found[:3]:
        assert not isinstance(one, Miss)
        read(one)
    at = scrape(store)
    assert at("lookups_total", tier="disk", result="hit") == 3
    assert at("lookups_total", tier="disk", result="absent") == 1
    assert at("lookup_tokens_total", tier="disk", result="hit") == 3 * TOKENS
    assert at("lookup_tokens_total", tier="disk", result="absent") == TOKENS
    assert at("lookups_total", tier="memory", result="absent") == 1, "asked only for what the disk lacks"
    assert at("lookups_total", tier="host", result="absent") == 4
    assert at("loads_total", tier="disk", result="ok", kind="full") == at.sum("loads_total", tier="disk") == 3
    row = sum(s.num_kv_heads * (s.key_dim + s.value_dim) for s in LAYOUT.layers) * 2
    assert at("load_bytes_total", tier="disk") == 3 * TOKENS * row
    assert at("load_rows_total", tier="disk") == 3 * TOKENS * len(LAYOUT.layers)
    assert at("load_seconds_count", tier="disk") == at("first_byte_seconds_count", tier="disk") == 3
    assert 0 < at("load_seconds_sum", tier="disk") < 10
    assert 0 < at("first_byte_seconds_sum", tier="disk") < 10
    rate = at("load_bytes_total", tier="disk") / at("load_seconds_sum", tier="disk")
    assert at("bandwidth_bytes_per_second", tier="disk") == pytest.approx(2 * rate), "two threads"
    assert not at.sum("bandwidth_bytes_per_second", tier="memory"), "nothing was read there"
    assert 170 < at("saved_prefill_seconds_total", tier="disk") <= 180, "a minute each, less the loads"
    assert at("lost_seconds_total", tier="disk") == 0
    assert at.sum("promotions_total") == 0, "host memory has no room"

    dropped = store.find([records[0].identity])[0]
    assert not isinstance(dropped, Miss)
    dropped.read(torch.arange(TOKENS), 0, 1, 10.0)
    dropped.close()
    assert scrape(store)("loads_total", tier="disk", result="dropped", kind="full") == 1


def test_partial_loads(store: TieredStore) -> None:
    one = record(1)
    store.put(one, wait=True)
    assert store.flush(10)
    (found,) = store.find([one.identity])
    assert not isinstance(found, Miss)
    for tokens, first_layer in ((TOKENS, 1), (1, 0)):
        reader = found.read(torch.arange(tokens), first_layer, 1, 10.0)
        for layer in range(first_layer, len(LAYOUT.layers)):
            reader.layer(layer)
    at = scrape(store)
    found.close()
    assert at("loads_total", tier="disk", result="ok", kind="partial") == at.sum("loads_total", tier="disk") == 2
    assert TOKENS + 2 <= at("load_rows_total", tier="disk") < 3 * TOKENS, "groups of rows are read whole"


def test_promotions(store: TieredStore, tmp_path: Path) -> None:
    store.put(record(1), wait=True)
    assert store.flush(10)
    roomy = TieredStore(HostStore(2**24), [DiskBlobs(tmp_path / "store", 2**26)], layout=LAYOUT)
    (found,) = roomy.find([record(1).identity])
    assert not isinstance(found, Miss)
    read(found)
    assert roomy.flush(10)
    at = scrape(roomy)
    assert at("promotions_total", tier="disk", result="ok") == 1
    assert at("records", tier="host") == 1
    roomy.close()


def test_failures_and_their_reasons(store: TieredStore, far: FaultyBlobs, tmp_path: Path) -> None:
    records = [record(i) for i in range(4)]
    for one in records[:2]:
        store.put(one, wait=True)
    assert store.flush(10)
    path = tmp_path / "store" / "v1" / f"{records[0].key.name}.kvr"
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    first, second = store.find([records[0].identity, records[1].identity])
    assert not isinstance(first, Miss)
    assert first.tier == "memory", "the next tier has it"
    read(first)
    assert not isinstance(second, Miss)
    second.close()
    at = scrape(store)
    assert at("lookups_total", tier="disk", result="checksum") == 1
    assert at("corrupt_total", tier="disk", kind="checksum") == 1
    assert at.sum("incompatible_total") == 0
    assert at("records", tier="disk") == 1

    far.choose = always("io")
    store.put(records[2], wait=True)
    assert store.flush(10)
    for _ in range(6):
        store.find([records[3].identity])
    at = scrape(store)
    assert at("puts_total", tier="memory", result="io") == 1
    assert at("puts_total", tier="disk", result="ok") == 3
    assert at("lookups_total", tier="memory", result="io") >= 1
    assert at("lookups_total", tier="memory", result="breaker") >= 1
    assert at("tier_up", tier="memory") == 0
    assert at("breaker_open", tier="memory") == 1
    assert at("breaker_transitions_total", tier="memory", state="open") == 1
    assert at("tier_up", tier="disk") == 1


def test_refused_and_evicted(tmp_path: Path) -> None:
    store = TieredStore(HostStore(0), [DiskBlobs(tmp_path / "store", 70_000)], layout=LAYOUT)
    for i in range(12):
        store.put(record(i), wait=True)
        store.flush(10)
    at = scrape(store)
    assert at("puts_total", tier="disk", result="ok") == 12
    assert at("evictions_total", tier="disk", reason="capacity") == 12 - at("records", tier="disk") > 0
    assert at("evictions_total", tier="disk", reason="quota") == 0
    assert at("evicted_bytes_total", tier="disk") > 0
    assert at("bytes", tier="disk") <= 70_000
    store.find([record(0).identity])
    assert scrape(store)("lookups_total", tier="disk", result="evicted") == 1
    store.close()


def test_quota_and_pins(tmp_path: Path) -> None:
    disk = DiskBlobs(tmp_path / "store", 2**26, default_quota=Quota(max=20_000))
    store = TieredStore(HostStore(0), [disk], layout=LAYOUT)
    for i in range(4):
        store.put(record(i), wait=True)
        store.flush(10)
    at = scrape(store)
    assert at("evictions_total", tier="disk", reason="quota") == 4 - at("records", tier="disk") > 0
    assert at("evictions_total", tier="disk", reason="capacity") == 0
    assert at("pins", tier="disk") == at("pinned_bytes", tier="disk") == 0
    assert disk.pin(record(3).key, time.time() + 60, "test")
    at = scrape(store)
    assert at("pins", tier="disk") == 1
    assert at("pinned_bytes", tier="disk") == (tmp_path / "store" / "v1" / f"{record(3).key.name}.kvr").stat().st_size
    store.close()


def test_erasures_that_are_pending(store: TieredStore, far: FaultyBlobs) -> None:
    far.choose = always("io")
    assert store.erase("ada").pending == ("memory",)
    assert scrape(store)("deletes_pending") == 1


def test_a_medium_that_cannot_tell_is_down(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: DiskBlobs) -> None:
        raise TierError("busy", "locked")

    monkeypatch.setattr(DiskBlobs, "stats", busy)
    at = scrape(store)
    assert at("tier_up", tier="disk") == 0
    assert at("tier_up", tier="memory") == 1


def test_a_scrape_does_not_wait_for_a_medium_that_hangs(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    monkeypatch.setattr(metrics, "_PATIENCE", 0.05)
    monkeypatch.setattr(DiskBlobs, "stats", lambda self: hung.wait(30))
    for _ in range(3):
        at = scrape(store)
        assert at("tier_up", tier="disk") == 0
        assert at("tier_up", tier="memory") == 1
    hung.set()


def test_nobody_is_named_and_nothing_is_global(store: TieredStore) -> None:
    before = set(REGISTRY._names_to_collectors)
    for tenant in ("ada lovelace", "bob"):
        store.put(record(1, tenant), wait=True)
    store.flush(10)
    text = render(store)
    for word in ("ada", "bob", Scope.of("bob").tag.hex(), record(1, "bob").key.content.hex(), MODEL.short, "secret"):
        assert word not in text
    assert set(REGISTRY._names_to_collectors) == before
    assert text.count("# TYPE kvweave_store_lookups_total counter") == 1
    assert not re.search(r" nan$|_created", text, re.IGNORECASE | re.MULTILINE)


def test_counters_never_fall(store: TieredStore) -> None:
    last = scrape(store)
    for i in range(4):
        store.put(record(i % 2), wait=True)
        store.flush(10)
        for one in store.find([record(i).identity]):
            if not isinstance(one, Miss):
                read(one)
        now = scrape(store)
        for key, value in last.samples.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert now.samples[key] >= value, key
        last = now


def test_a_host_store_alone() -> None:
    host = HostStore(2**20)
    host.put(record(1))
    host.find([record(1).identity, record(2).identity])
    text = render(host)
    assert 'kvweave_store_lookups_total{result="hit",tier="host"} 1.0' in text
    assert 'kvweave_store_records{tier="host"} 1.0' in text


def test_histogram_classes() -> None:
    times = Times()
    for seconds in (0.0, 0.001, 0.0011, 3.0, 30.0, 31.0):
        times.add(seconds)
    assert times.counts[0] == 2, "a bound belongs to its class"
    assert times.counts[1] == 1
    assert times.counts[-2:] == [1, 1]
    assert sum(times.counts) == 6
    assert len(times.counts) == len(BOUNDS) + 1
