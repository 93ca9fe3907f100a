"""Each reason for a miss, from the situation it names; token kinds that add up to the report's."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.core.keys import ModelFingerprint
from kvweave.core.prompt import Document
from kvweave.core.report import TOKEN_KINDS, ReuseReport, SegmentReport
from kvweave.server.explain import Circumstances, Earlier, MissReason, compare, explain, published_tokens
from kvweave.server.shape import RequestShape
from tests.server.shapes import KEY, exact, shape, words

SYSTEM = ("system", words(40))
ASK = ("user", words(20, 1))
NOW = Circumstances(now=1000.0)


def earlier(of: RequestShape, *, published: int | None = None, answer: int = 0, expires: float | None = None) -> Earlier:
    reach = of.num_tokens if published is None else published
    return Earlier("chatcmpl-1", of, reach, of.num_tokens + answer, expires)


def left(now: RequestShape, hit: int, before: Earlier | None) -> dict[str, Any]:
    found = explain(exact(now, hit), now, before, NOW)["prefix"]
    assert found["hit_tokens"] == hit
    return found["diverged"]


def test_all_but_the_last_token_found_is_no_divergence() -> None:
    now = shape(SYSTEM, ASK)
    assert left(now, now.num_tokens - 1, earlier(now)) is None


def test_nothing_was_looked_for() -> None:
    now = shape(SYSTEM, ASK)
    report = ReuseReport("off", "off", "full", now.num_tokens, prefilled_tokens=now.num_tokens)
    assert explain(report, now, earlier(now), NOW)["prefix"]["diverged"] is None


def test_a_first_request_was_never_seen() -> None:
    now = shape(SYSTEM, ASK)
    assert left(now, 0, None) == {
        "token": 0,
        "message": 0,
        "segment": None,
        "reason": "never_seen",
        "cost_tokens": now.num_tokens,
    }


def test_a_stranger_to_all_earlier_ones_was_never_seen_either() -> None:
    now, before = shape(("user", words(50, 7))), shape(("user", words(50, 8)))
    assert left(now, 1, earlier(before))["reason"] == "never_seen"


def test_a_new_turn_was_never_seen_and_names_its_message() -> None:
    before = shape(SYSTEM, ASK)
    now = shape(SYSTEM, ASK, ("assistant", "fine thanks"), ("user", "and you ?"))
    hit = before.num_tokens + 2  # all that was written: the end of the answer never had KV
    found = left(now, hit, earlier(before.answered(KEY, ["fine thanks"]), answer=2))
    assert (found["reason"], found["message"]) == ("never_seen", 2)


def test_an_answer_rendered_back_with_other_ids_was_retokenized() -> None:
    before = shape(SYSTEM, ASK)
    now = shape(SYSTEM, ASK, ("assistant", "fine thanks"), ("user", "and you ?"))
    found = left(now, before.num_tokens, earlier(before.answered(KEY, ["fine thanks"]), answer=2))
    assert (found["reason"], found["message"], found["token"]) == ("retokenized", 2, before.num_tokens)
    other = left(now, before.num_tokens, earlier(before.answered(KEY, ["something else"]), answer=2))
    assert other["reason"] == "never_seen"


def test_a_changed_system_message() -> None:
    now, before = shape(("system", words(35) + " noon"), ASK), shape(("system", words(35) + " dawn"), ASK)
    found = left(now, 36, earlier(before))
    assert (found["reason"], found["token"], found["message"]) == ("system_changed", 36, 0)
    assert found["cost_tokens"] == now.num_tokens - 36


def test_changed_tools_stand_in_front_of_everything() -> None:
    now, before = shape(SYSTEM, ASK, tools="get weather"), shape(SYSTEM, ASK, tools="get time")
    assert left(now, 1, earlier(before))["reason"] == "tools_changed"


def test_a_changed_message() -> None:
    now, before = shape(SYSTEM, ("user", words(20, 2))), shape(SYSTEM, ASK)
    found = left(now, 43, earlier(before))
    assert (found["reason"], found["message"]) == ("messages_changed", 1)


def test_a_changed_document_is_named() -> None:
    def ask(text: str) -> RequestShape:
        return shape(SYSTEM, ("user", [Document(text, id="doc:1"), "who ?"]))

    found = left(ask(words(20, 2)), 43, earlier(ask(words(20, 3))))
    assert (found["reason"], found["message"], found["segment"]) == ("messages_changed", 1, "doc:1")


def test_a_template_of_another_server_version() -> None:
    now, before = shape(SYSTEM, ASK), shape(SYSTEM, ("user", words(5, 3)))
    before = RequestShape(**{**before.__dict__, "template": "other"})
    assert left(now, 43, earlier(before))["reason"] == "template_changed"


def test_another_salt_and_another_model() -> None:
    now = shape(SYSTEM, ASK)
    assert left(now, 0, earlier(shape(SYSTEM, ASK, salt="s")))["reason"] == "salt_changed"
    assert left(now, 0, earlier(shape(SYSTEM, ASK, model=ModelFingerprint.of(content="n"))))["reason"] == "model_changed"


def test_what_was_there_and_is_gone() -> None:
    now = shape(SYSTEM, ASK)
    assert left(now, 10, earlier(now))["reason"] == "evicted"
    assert left(now, 10, earlier(now, expires=999.0))["reason"] == "expired"
    assert left(now, 10, earlier(now, expires=1001.0))["reason"] == "evicted"
    assert left(now, 10, earlier(now, published=0))["reason"] == "not_stored"
    assert left(now, 10, earlier(now, published=10))["reason"] == "not_stored"


def fused(prompt: RequestShape, *segments: SegmentReport, prefix: int) -> ReuseReport:
    inside = {kind: sum(s.tokens[kind] for s in segments) for kind in TOKEN_KINDS}
    outside = prompt.num_tokens - sum(inside.values())
    return ReuseReport(
        asked="fused",
        ran="fused",
        technique="cacheblend",
        prompt_tokens=prompt.num_tokens,
        cached_tokens=inside["exact"] + prefix,
        prefix_tokens=prefix,
        fused_tokens=inside["fused"],
        recomputed_tokens=inside["recomputed"],
        prefilled_tokens=inside["prefilled"] + outside - prefix,
        segments=segments,
    )


def segment(id: str, start: int, reason: str | None, tiers: tuple[str, ...] = (), **tokens: int) -> SegmentReport:
    kinds = {kind: tokens.get(kind, 0) for kind in TOKEN_KINDS}
    return SegmentReport(id, start, start + sum(kinds.values()), "miss", reason, tiers, kinds)


def test_segments_of_a_fused_prompt() -> None:
    asked = [Document(words(20, 2), id="doc:1"), Document(words(20, 3), id="doc:2"), Document("tiny", id="doc:3"), "who ?"]
    now = shape(SYSTEM, ("user", asked))
    parts = (
        segment("doc:1", 43, None, ("disk",), fused=15, recomputed=5),
        segment("doc:2", 63, "evicted", prefilled=20),
        segment("doc:3", 83, "below_min", prefilled=1),
    )
    report = fused(now, *parts, prefix=42)
    report.check()
    told = explain(report, now, None, Circumstances(0.0, "open", ("extra",), ("careful",)))
    first, second, third = told["segments"]
    assert first == {
        "segment": "doc:1",
        "kind": "document",
        "message": 1,
        "span": [43, 63],
        "result": "hit",
        "tier": "disk",
        "tokens": {"fused": 15, "recomputed": 5},
    }
    assert (second["result"], second["reason"], second["tokens"]) == ("miss", "evicted", {"prefilled": 20})
    assert third["reason"] == "below_min"
    assert told["other"] == {"exact": 42, "prefilled": now.num_tokens - 42 - 41}
    assert (told["gate"], told["ignored"], told["warnings"]) == ("open", ["extra"], ["careful"])
    assert published_tokens(report, publish=True) == 43


def test_in_exact_mode_documents_miss_for_the_prefixs_reason() -> None:
    def ask(*order: int) -> RequestShape:
        return shape(SYSTEM, ("user", [Document(words(20, i), id=f"doc:{i}") for i in order]))

    now = ask(3, 2)
    parts = (segment("doc:3", 43, "never_seen", prefilled=20), segment("doc:2", 63, "never_seen", prefilled=20))
    report = fused(now, *parts, prefix=43)
    report = ReuseReport(**{**report.__dict__, "asked": "exact", "ran": "exact", "technique": "prefix"})
    told = explain(report, now, earlier(ask(2, 3)), NOW)
    assert [s["reason"] for s in told["segments"]] == ["messages_changed"] * 2
    assert published_tokens(report, publish=True) == now.num_tokens
    assert published_tokens(report, publish=False) == 0


def test_a_segment_in_the_prefix_lies_on_the_device() -> None:
    now = shape(("user", [Document(words(20, 2), id="doc:1"), "who ?"]))
    told = explain(fused(now, segment("doc:1", 1, "never_seen", exact=20), prefix=1), now, None, NOW)
    (found,) = told["segments"]
    assert (found["result"], found["tier"]) == ("hit", "device")
    assert "reason" not in found


@pytest.mark.parametrize("reason", ["deleted", "checksum", "io", "deadline", "fingerprint", "absent", "expired"])
def test_reasons_are_of_the_closed_list(reason: str) -> None:
    now = shape(("user", [Document(words(20, 2), id="doc:1"), "who ?"]))
    told = explain(fused(now, segment("doc:1", 1, reason, prefilled=20), prefix=0), now, None, NOW)
    assert told["segments"][0]["reason"] in get_args(MissReason)


KINDS = st.fixed_dictionaries({kind: st.integers(0, 9) for kind in TOKEN_KINDS})


@settings(deadline=None)
@given(st.lists(KINDS.filter(lambda kinds: sum(kinds.values()) > 0), max_size=6), st.integers(0, 3))
def test_segments_and_other_add_up_to_usage(tokens: list[dict[str, int]], prefix: int) -> None:
    documents = [Document(words(sum(kinds.values()), i), id=f"doc:{i}") for i, kinds in enumerate(tokens)]
    now = shape(("user", ["a", "b", *documents, "who ?"]))
    at, parts = 3, []
    for i, kinds in enumerate(tokens):
        parts.append(SegmentReport(f"doc:{i}", at, at + sum(kinds.values()), "partial", None, (), kinds))
        at = parts[-1].stop
    report = fused(now, *parts, prefix=prefix)
    told = explain(report, now, None, NOW)
    for kind, count in zip(TOKEN_KINDS, ("cached", "fused", "recomputed", "prefilled"), strict=True):
        listed = sum(s["tokens"].get(kind, 0) for s in told["segments"]) + told["other"].get(kind, 0)
        assert listed == getattr(report, f"{count}_tokens")


def test_two_requests_compared() -> None:
    a, b = shape(SYSTEM, ASK), shape(SYSTEM, ("user", words(20, 2)))
    assert compare(b, a) == {
        "token": 42,
        "message": 1,
        "segment": None,
        "reason": "messages_changed",
        "cost_tokens": b.num_tokens - 42,
    }
    assert compare(a, a) is None
    assert compare(shape(SYSTEM, ASK, salt="s"), a) == {
        "token": 0,
        "message": 0,
        "segment": None,
        "reason": "salt_changed",
        "cost_tokens": a.num_tokens,
    }
