"""Cache options: every spelling leads to the same value, and none is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.core.prompt import Document
from kvweave.errors import ConflictingFields, InvalidRequest, RequestError, UnsupportedParameter
from kvweave.protocol.cache import DEFAULT_PIN, CacheOptions, Pin
from kvweave.protocol.cache_bodies import CacheBody, seconds
from kvweave.protocol.chat import ChatRequest, parse_chat
from kvweave.protocol.limits import Limits

USER = {"role": "user", "content": "Hello"}
FULL = {
    "reuse": "fused",
    "technique": "epic:k=32",
    "recompute_ratio": 0.5,
    "max_divergence": 1,
    "fallback": "refuse",
    "ttl": "500ms",
    "store": "none",
    "explain": True,
    "timings": False,
    "max_restore_tokens": 7,
}


def parse(headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    return parse_chat({"messages": [USER], **fields}, headers or {}, Limits(min_ttl=0.5))


def part(text: str = "Text.", **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_every_key_arrives_under_every_name() -> None:
    expected = CacheOptions(
        reuse="fused",
        technique="epic:k=32",
        recompute_ratio=0.5,
        max_divergence=1,
        fallback="refuse",
        ttl=0.5,
        store="none",
        explain=True,
        timings=True,
        max_restore_tokens=7,
        given=True,
    )
    requests = parse(cache=FULL), parse(kv_cache=FULL), parse({"x-KV-cache": json.dumps(FULL)})
    assert [(r.cache, r.operations) for r in requests] == [(expected, len(FULL))] * 3


def test_empty_is_absent() -> None:
    for fields in ({"cache": None}, {"cache": {}}, {"kv_cache": {"drop": {}, "reposition": []}}, {"cache": {"reuse": None}}):
        request = parse(**fields)
        assert (request.cache, request.operations) == (CacheOptions(), 0)


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({}, {"cache": {}, "kv_cache": {}}, "kv_cache"),
        ({"X-KV-Cache": "{}"}, {"cache": {}}, "X-KV-Cache"),
        ({}, {"extra_body": {"cache": {"reuse": "off"}}}, "extra_body.cache"),
        ({}, {"extra_body": {"documents": []}}, "extra_body.documents"),
        ({}, {"cache": {"ttl": 5}, "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({}, {"cache": {"store": "all"}, "prompt_cache_retention": "in_memory"}, "prompt_cache_retention"),
        ({}, {"cache": {"ttl": 5}, "documents": [{"text": "a", "cache": {"pin": 6}}]}, "cache.ttl"),
        (
            {},
            {"messages": [{"role": "user", "content": [part(cache={}, cache_control={"type": "ephemeral"})]}]},
            "messages[0].content[0].cache_control",
        ),
    ],
)
def test_conflicts(headers: dict[str, str], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ConflictingFields) as caught:
        parse(headers, **fields)
    assert caught.value.param == param


def test_other_wrappers_are_only_ignored() -> None:
    assert parse(extra_body={"x": 1}).operations == 0


def test_retention_is_a_longest_life() -> None:
    assert parse(prompt_cache_retention="24h").cache == CacheOptions(ttl=86400.0, given=True)
    assert parse(prompt_cache_retention="in_memory").cache == CacheOptions(store="memory", given=True)
    assert parse(prompt_cache_retention="24h", cache={"store": "none"}).cache.store == "none"


def test_salt_and_affinity() -> None:
    cache = parse({"X-Session-Id": "h"}, cache_salt="s").cache
    assert (cache.salt, cache.affinity, cache.given) == ("s", "h", False)
    assert parse({"x-session-id": "h"}, session_id="b").cache.affinity == "b"
    assert parse(prompt_cache_key="k", session_id="b").cache.affinity == "k"
    with pytest.raises(InvalidRequest):
        parse(cache_salt="x" * 129)


def test_marks_make_segments_and_pins() -> None:
    content = [part("A.", cache={"segment": "a", "pin": "1h"}), part("B.", cache={}), part("C.", cache={"kind": "text"})]
    request = parse(messages=[{"role": "user", "content": content}], documents=[{"doc_id": "1", "text": "D."}])
    first = Document("A.", id="a")
    assert request.conversation.messages[0].content == (first, Document("B."), Document("C.", kind="text"))
    assert request.conversation.documents == (Document("D.", id="doc:1"),)
    assert request.cache.pins == (Pin(3600.0, strict=True, document=first),)
    assert request.operations == 4


def test_breakpoints_of_others_are_pins_that_may_fail() -> None:
    content = [part(cache_control={"type": "ephemeral"}), part(prompt_cache_breakpoint={"ttl": "30m"})]
    request = parse(
        messages=[USER, {"role": "user", "content": content}],
        cache_control={"type": "ephemeral", "ttl": "1h"},
        prompt_cache_options={"ttl": 60},
    )
    assert request.conversation.messages[1].content == ("Text.", "Text.")
    assert request.cache.pins == (
        Pin(DEFAULT_PIN, strict=False, message=1, part=0),
        Pin(1800.0, strict=False, message=1, part=1),
        Pin(60.0, strict=False),
        Pin(3600.0, strict=False),
    )
    assert request.operations == 4


def test_one_label_two_texts() -> None:
    same = [part("A.", cache={"segment": "a"})] * 2
    assert parse(messages=[{"role": "user", "content": same}]).operations == 2
    with pytest.raises(InvalidRequest, match="'a' stands on two texts"):
        parse(messages=[{"role": "user", "content": [*same, part("B.", cache={"segment": "a"})]}])


@pytest.mark.parametrize("label", ["", "a b", "ä", "x" * 129, "a\n"])
def test_labels(label: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(messages=[{"role": "user", "content": [part(cache={"segment": label})]}])
    assert caught.value.param == "messages[0].content[0].cache.segment"


def test_white_space_is_no_segment() -> None:
    request = parse(messages=[{"role": "user", "content": [part(" \n", cache={}), part("A.")]}])
    assert request.conversation.messages[0].content == (" \n", "A.")
    assert request.operations == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache": {"drop": {"0": [0]}}}, "cache"),
        ({"cache": {"reposition": [0]}}, "cache"),
        ({"drop_message": {"0": [0]}}, "cache"),
        ({"reposition": [0]}, "cache"),
        ({"cache": {"template": "agent@3"}}, "cache.template"),
        ({"messages": [{"role": "user", "content": [part(cache={"kind": "fixed"})]}]}, "messages[0].content[0].cache.kind"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "cache"),
    ],
)
def test_what_comes_later_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter, match="later version") as caught:
        parse(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("value", "expected"), [(30, 30.0), ("500ms", 0.5), ("30s", 30.0), ("5m", 300.0), ("1h", 3600.0), ("7d", 604800.0)]
)
def test_durations(value: Any, expected: float) -> None:
    assert seconds(value) == expected
    assert CacheBody.model_validate({"ttl": value}).ttl == expected


@given(st.sampled_from(["5", "5 m", "m", "-5m", "1.5h", "5M", "", "١m", "5m\n"]) | st.booleans() | st.floats())
def test_no_durations(value: Any) -> None:
    with pytest.raises(RequestError):
        parse(cache={"ttl": value})


@pytest.mark.parametrize("value", [0, -1, "100ms", "31d", 10**300])
def test_lives_out_of_range(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        parse(cache={"ttl": value})


def test_the_header_has_a_limit() -> None:
    with pytest.raises(InvalidRequest, match="the limit is 8,192"):
        parse({"X-KV-Cache": json.dumps({"technique": "x" * 8192})})
