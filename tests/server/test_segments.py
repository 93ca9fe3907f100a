"""Labels follow content, pins protect what they say, and quotas hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvweave.core.prompt import Document
from kvweave.errors import PinQuotaExceeded, SegmentNotFound
from kvweave.llm import LLM
from kvweave.protocol.cache import Pin
from tests.server.offices import Office, document

SLOTS = 2048


@pytest.fixture
def office(tiny_model_dir: Path) -> Iterator[Office]:
    with LLM(tiny_model_dir, threads=1, chunk_size=64, min_chunk=16, min_reuse_tokens=0, chunk_cache="1MiB") as llm:
        yield Office(llm)


def asked(*parts: str | Document) -> tuple[str, list[str | Document]]:
    return "user", [*parts, "who ?"]


def test_a_label_is_listed_with_what_is_cached_under_it(office: Office) -> None:
    office.ask(asked(document(1, "doc:1"), document(2)))
    found = office.segments.describe("t", "", "doc:1")
    per_token = office.llm.engine.parts.pool.layout.bytes_per_token
    assert (found["tokens"], found["kind"], found["hits"], found["provenance"]) == (96, "document", 0, "prefix")
    assert found["tiers"] == {"device": {"tokens": 96, "bytes": 96 * per_token}}
    office.llm.precompute([document(1)], head=office.llm.render([{"role": "user", "content": [document(1)]}]), tenant="t")
    found = office.segments.describe("t", "", "doc:1")
    assert (set(found["tiers"]), found["provenance"]) == ({"device", "host"}, "chunk")
    assert found["bytes"] == 2 * 96 * per_token
    office.ask(asked(document(1, "doc:1"), document(2)))
    assert office.segments.describe("t", "", "doc:1")["hits"] == 1


def test_labels_belong_to_tenant_and_salt(office: Office) -> None:
    office.ask(asked(document(1, "doc:1")), salt="s")
    assert office.segments.describe("t", "s", "doc:1")
    for tenant, salt in (("t", ""), ("t", "x"), ("u", "s")):
        with pytest.raises(SegmentNotFound, match="doc:1"):
            office.segments.describe(tenant, salt, "doc:1")


def test_a_label_moves_to_a_new_text(office: Office) -> None:
    for _ in range(2):
        office.ask(asked(document(1, "doc:1")))
    assert office.segments.describe("t", "", "doc:1")["hits"] == 1
    office.ask(asked(document(2, "doc:1", n=50)))
    moved = office.segments.describe("t", "", "doc:1")
    assert (moved["tokens"], moved["hits"]) == (50, 0)


def test_pages_are_in_order_and_complete(office: Office) -> None:
    labels = [f"doc:{i:02}" for i in range(7)] + ["other"]
    office.ask(asked(*(document(i, label, n=20) for i, label in enumerate(labels))))
    seen: list[str] = []
    more = True
    while more:
        page, more = office.segments.page("t", "", "doc:", 3, seen[-1] if seen else "")
        seen += [one["id"] for one in page]
    assert seen == labels[:-1]


def test_a_pinned_prefix_survives_what_evicts_the_others(tiny_model_dir: Path) -> None:
    with LLM(tiny_model_dir, threads=1, kv_pool="1MiB") as llm:
        per_token = llm.engine.parts.pool.layout.bytes_per_token
    with LLM(tiny_model_dir, threads=1, kv_pool=per_token * SLOTS) as llm:
        office = Office(llm)
        office.ask(asked(document(1, "doc:1", n=300)))
        office.ask(asked(document(2, "doc:2", n=300)))
        until = office.segments.pin("t", "", "doc:1", 600)
        assert until > time.time() + 590
        for seed in range(3, 20):  # more than the pool holds
            office.ask(asked(document(seed, n=300)))
        kept, gone = (office.segments.describe("t", "", f"doc:{i}") for i in (1, 2))
        assert kept["tiers"]["device"]["tokens"] == 300
        assert kept["pinned_until"] == until
        assert _cached(gone) < 10  # the first characters of another's
        office.segments.unpin("t", "", "doc:1")
        for seed in range(3, 20):
            office.ask(asked(document(seed, n=300)))
        assert _cached(office.segments.describe("t", "", "doc:1")) < 10


def _cached(described: dict[str, Any]) -> int:
    return sum(tier["tokens"] for tier in described["tiers"].values())


def test_a_pinned_chunk_survives_what_evicts_the_others(office: Office) -> None:
    for seed in (1, 2):
        office.ask(asked(document(seed, f"doc:{seed}")))
    head = office.llm.render([{"role": "user", "content": [document(0)]}])
    office.llm.precompute([document(1), document(2)], head=head, tenant="t")
    office.segments.pin("t", "", "doc:1", 600)
    office.llm.precompute([document(seed) for seed in range(10, 60)], head=head, tenant="t")
    assert "host" in office.segments.describe("t", "", "doc:1")["tiers"]
    assert "host" not in office.segments.describe("t", "", "doc:2")["tiers"]


def test_pins_beyond_a_quarter_are_refused_and_pin_nothing(tiny_model_dir: Path) -> None:
    with LLM(tiny_model_dir, threads=1, kv_pool="1MiB") as llm:
        office = Office(llm)
        slots = llm.engine.allocator.num_slots
        office.ask(asked(document(1, "doc:1", n=slots // 3)))
        with pytest.raises(PinQuotaExceeded, match="quota 25%"):
            office.segments.pin("t", "", "doc:1", 600)
        assert llm.loop.call(lambda engine: engine.tree.pinned_tokens()) == 0
        assert office.segments.describe("t", "", "doc:1")["pinned_until"] is None


def test_all_tenants_together_pin_at_most_half(tiny_model_dir: Path) -> None:
    with LLM(tiny_model_dir, threads=1, kv_pool="1MiB") as llm:
        office = Office(llm)
        n = llm.engine.allocator.num_slots // 5
        for tenant in ("a", "b", "c"):
            office.ask(asked(document(1, "doc:1", n=n)), tenant=tenant)
        for tenant in ("a", "b"):
            office.segments.pin(tenant, "", "doc:1", 600)
        with pytest.raises(PinQuotaExceeded, match="quota 50%"):
            office.segments.pin("c", "", "doc:1", 600)


def test_host_memory_has_a_quota_for_each_tenant(office: Office) -> None:
    per_token = office.llm.engine.parts.pool.layout.bytes_per_token
    n = 2**20 // 3 // per_token
    office.ask(asked(document(1, "doc:1", n=n), document(2, "doc:2", n=64)))
    head = office.llm.render([{"role": "user", "content": [document(1)]}])
    office.llm.precompute([document(1, n=n), document(2, n=64)], head=head, tenant="t")
    office.segments.pin("t", "", "doc:2", 600)
    store, scope = office.llm.engine.parts.chunks.store, office.llm.engine.parts.chunks.scope("t")
    pinned = store.pinned_bytes(scope.tag)
    with pytest.raises(PinQuotaExceeded, match="host memory, quota 25%"):
        office.segments.pin("t", "", "doc:1", 600)
    assert store.pinned_bytes(scope.tag) == pinned > 0


def test_marks_pin_documents_and_messages(office: Office) -> None:
    labelled, plain = document(1, "doc:1", n=50), document(2, n=30)
    pins = (Pin(600, True, document=labelled), Pin(600, True, document=plain), Pin(600, False, message=0))
    before = time.time()
    office.ask(("system", "be brief"), asked(labelled, plain), pins=pins)
    pinned = office.llm.loop.call(lambda engine: engine.tree.pinned_tokens())
    exchange = office.exchange(("system", "be brief"), asked(labelled, plain))
    assert pinned == len(exchange.prompt.token_ids) - len("\nwho ?") - 2  # up to the end of the second document
    assert office.segments.describe("t", "", "doc:1")["pinned_until"] >= before + 600


def test_a_use_renews_a_pin(office: Office) -> None:
    office.ask(asked(document(1, "doc:1")))
    first = office.segments.pin("t", "", "doc:1", 600)
    office.ask(asked(document(1, "doc:1")))
    assert office.segments.describe("t", "", "doc:1")["pinned_until"] > first


def test_strict_pins_are_checked_before_anything_runs(tiny_model_dir: Path) -> None:
    with LLM(tiny_model_dir, threads=1, kv_pool="1MiB", chunk_cache="1MiB") as llm:
        office = Office(llm)
        one = document(1, "doc:1", n=1500)
        size = 1500 * llm.engine.parts.pool.layout.bytes_per_token
        assert size > 2**18
        for pin, refused in ((Pin(60, True, document=one), True), (Pin(60, False, document=one), False)):
            exchange = office.exchange(asked(one), pins=(pin,))
            if refused:
                with pytest.raises(PinQuotaExceeded):
                    office.segments.check_pins(exchange)
            else:
                office.segments.check_pins(exchange)


def test_removing_takes_records_and_label(office: Office) -> None:
    office.ask(asked(document(1, "doc:1")))
    office.llm.precompute([document(1)], head=office.llm.render([{"role": "user", "content": [document(1)]}]), tenant="t")
    office.segments.pin("t", "", "doc:1", 600)
    assert office.segments.remove("t", "", "doc:1") == 2
    assert office.llm.engine.parts.chunks.store.stats().records == 0
    assert office.segments.totals("t") == {"count": 0, "pinned": 0}
    with pytest.raises(SegmentNotFound):
        office.segments.remove("t", "", "doc:1")


def test_erasing_forgets_one_tenants_labels(office: Office) -> None:
    for tenant in ("t", "u"):
        office.ask(asked(document(1, "doc:1"), document(2, "doc:2")), tenant=tenant)
    assert office.segments.erase("t") == 2
    assert office.segments.totals("t")["count"] == 0
    assert office.segments.totals("u")["count"] == 2
