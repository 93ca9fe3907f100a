"""Prompts through a tiny model: what its accounts say agrees with what the engine did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.llm import LLM
from tests.server.offices import Office, document

SYSTEM = ("system", "You are brief and answer in one word, whatever is asked of you.")


@pytest.fixture
def office(tiny_model_dir: Path) -> Iterator[Office]:
    with LLM(tiny_model_dir, threads=1, chunk_size=64, min_chunk=16, min_reuse_tokens=0) as llm:
        yield Office(llm)


def test_a_record_has_the_explanation_and_adds_up(office: Office) -> None:
    told = office.ask(SYSTEM, ("user", [document(1, "doc:1"), document(2), "who ?"]), ignored=("routed_by",))
    record = office.log.get("t", "req-0")
    assert record["cache"] == told
    assert told["ignored"] == ["routed_by"]
    assert [s["segment"] for s in told["segments"]] == ["doc:1", "document-1"]
    assert [s["message"] for s in told["segments"]] == [1, 1]
    listed = sum(sum(s["tokens"].values()) for s in told["segments"]) + sum(told["other"].values())
    assert listed == record["prompt_tokens"]
    assert record["tokens"] == {"exact": 0, "fused": 0, "recomputed": 0, "prefilled": listed}
    assert set(record["timings"]) >= {"queue_ms", "ttft_ms", "total_ms"}
    assert office.log.get("t", "chatcmpl-0") == record


def test_a_conversation_that_goes_on(office: Office) -> None:
    ask = ("user", "who signed it ?")
    first = office.ask(SYSTEM, ask)
    assert first["prefix"]["diverged"]["reason"] == "never_seen"
    again = office.ask(SYSTEM, ask)
    assert again["prefix"]["diverged"] is None
    assert again["prefix"]["hit_tokens"] > 0
    other = office.ask(SYSTEM, ("user", "where was it ?"))["prefix"]["diverged"]
    assert (other["reason"], other["message"]) == ("messages_changed", 1)
    new = office.ask(("system", SYSTEM[1].replace("brief", "long")), ask)["prefix"]["diverged"]
    assert (new["reason"], new["message"]) == ("system_changed", 0)
    assert new["cost_tokens"] > 0


def test_an_evicted_an_expired_and_an_unstored_prefix(office: Office) -> None:
    ask = ("user", "who signed it ?")
    office.ask(SYSTEM, ask, publish=False)
    assert office.ask(SYSTEM, ask)["prefix"]["diverged"]["reason"] == "not_stored"
    office.llm.reset_prefix_cache()
    assert office.ask(SYSTEM, ask)["prefix"]["diverged"]["reason"] == "evicted"
    office.llm.reset_prefix_cache()
    office.ask(SYSTEM, ask, ttl=0.05)
    time.sleep(0.1)
    assert office.ask(SYSTEM, ask)["prefix"]["diverged"]["reason"] == "expired"


def test_salts_and_tenants(office: Office) -> None:
    ask = ("user", "who signed it ?")
    office.ask(SYSTEM, ask)
    assert office.ask(SYSTEM, ask, salt="x")["prefix"]["diverged"]["reason"] == "salt_changed"
    assert office.ask(SYSTEM, ask, tenant="u")["prefix"]["diverged"]["reason"] == "never_seen"
    assert office.ask(SYSTEM, ask, salt="x")["prefix"]["diverged"] is None


def test_fused_documents_in_another_order(office: Office) -> None:
    documents = [document(i, f"doc:{i}") for i in range(3)]
    head = office.llm.render([{"role": "user", "content": [documents[0]]}])
    office.llm.precompute(documents[:2], head=head, tenant="t")
    exchange = office.exchange(("user", [documents[2], documents[1], documents[0], "who ?"]), gate="forced")
    told = office.answer(exchange, technique="cacheblend", recompute_ratio=0.3)
    assert (told["ran"], told["gate"]) == ("fused", "forced")
    missed, *hits = told["segments"]
    assert (missed["result"], missed["reason"]) == ("miss", "never_seen")
    for hit in hits:
        assert (hit["result"], hit["tier"]) == ("hit", "host")
        assert sum(hit["tokens"].values()) == 96
        assert set(hit["tokens"]) == {"fused", "recomputed"}
    left = office.ask(("user", [documents[2], documents[1]]))["prefix"]["diverged"]
    assert (left["reason"], left["segment"]) == ("not_stored", "doc:1")  # what was fused isn't exact
