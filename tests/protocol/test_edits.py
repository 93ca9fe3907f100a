"""Drop and reposition: the rules for what a schedule may say, by code and place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.client import count_ops
from kvweave.errors import (
    ConflictingFields,
    InvalidDrop,
    InvalidReposition,
    InvalidRequest,
    RequestError,
    UnsupportedParameter,
)
from kvweave.protocol.bodies import ChatCompletionBody
from kvweave.protocol.cache_bodies import CacheBody
from kvweave.protocol.edits import ClearToolUses, Edits, parse_edits
from kvweave.protocol.limits import Limits
from kvweave.protocol.validation import validate

MESSAGES = 10
LIMITS = Limits()


def edits(limits: Limits = LIMITS, **fields: Any) -> Edits:
    body = validate(ChatCompletionBody, {"messages": [{"role": "user", "content": "a"}] * MESSAGES, **fields})
    return parse_edits(body, body.cache or CacheBody(), "cache", MESSAGES, limits)


def refusal(limits: Limits = LIMITS, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        edits(limits, **fields)
    return caught.value


def test_a_schedule() -> None:
    cache = {"drop": {"2": [1], "9": [3, 4, 3]}, "reposition": [2, 9]}
    assert edits(cache=cache) == Edits({2: (1,), 9: (3, 4, 3)}, (2, 9))


@pytest.mark.parametrize("nothing", [None, {}, []])
def test_nothing(nothing: Any) -> None:
    assert not edits(cache={"drop": nothing, "reposition": nothing}, drop_message=nothing)
    assert not edits(cache={"drop": {"2": []}})


def test_a_drop_may_lie_in_the_future_a_reposition_may_not() -> None:
    assert edits(cache={"drop": {str(2**63 - 1): [500]}}).drop == {2**63 - 1: (500,)}
    assert type(refusal(cache={"reposition": [MESSAGES]})) is InvalidReposition


@pytest.mark.parametrize(
    ("drop", "param"),
    [
        (0, "cache.drop"),
        (False, "cache.drop"),
        ("", "cache.drop"),
        ([1], "cache.drop"),
        ({"1": 0}, "cache.drop.1"),
        ({"1": {"0": 1}}, "cache.drop.1"),
        ({"01": [0]}, "cache.drop.01"),
        ({"1.0": [0]}, "cache.drop.1.0"),
        ({"-1": [0]}, "cache.drop.-1"),
        ({"": [0]}, "cache.drop."),
        ({"١": [0]}, "cache.drop.\\u0661"),
        ({str(2**63): [0]}, f"cache.drop.{2**63}"),
        ({"1": [True]}, "cache.drop.1[0]"),
        ({"1": [0, "1"]}, "cache.drop.1[1]"),
        ({"1": [1.0]}, "cache.drop.1[0]"),
        ({"1": [-1]}, "cache.drop.1[0]"),
        ({"1": [None]}, "cache.drop.1[0]"),
        ({"2": [5]}, "cache.drop.2"),
        ({"99": [100]}, "cache.drop.99"),
    ],
)
def test_invalid_drops(drop: Any, param: str) -> None:
    error = refusal(cache={"drop": drop})
    assert type(error) is InvalidDrop
    assert error.param == param


def test_a_drop_of_the_future_says_what_to_do() -> None:
    message = 'cache.drop["2"]: message 5 comes after trigger 2. Name messages 0..2, or use trigger 5 or later.'
    assert str(refusal(cache={"drop": {"2": [5]}})) == message


@pytest.mark.parametrize(
    ("reposition", "param"),
    [
        (3, "cache.reposition"),
        ({"1": 2}, "cache.reposition"),
        ([True], "cache.reposition[0]"),
        (["0"], "cache.reposition[0]"),
        ([0.0], "cache.reposition[0]"),
        ([-1], "cache.reposition[0]"),
        ([1, 1], "cache.reposition[1]"),
        ([2, 3, 1], "cache.reposition[2]"),
        ([1, 10], "cache.reposition[1]"),
    ],
)
def test_invalid_repositions(reposition: Any, param: str) -> None:
    error = refusal(cache={"reposition": reposition})
    assert type(error) is InvalidReposition
    assert error.param == param


def test_edits_are_limited_together() -> None:
    cache = {"drop": {"3": [0, 1]}, "reposition": [3]}
    edits(Limits(edits=3), cache=cache)
    assert type(refusal(Limits(edits=2), cache=cache)) is InvalidDrop


@pytest.mark.parametrize("value", [-1, 1.0, "1", True])
def test_the_cap_on_restoring(value: Any) -> None:
    error = refusal(cache={"max_restore_tokens": value})
    assert (type(error), error.param) == (InvalidRequest, "cache.max_restore_tokens")


@pytest.mark.parametrize(
    "fields",
    [
        {"drop_message": {"2": [1]}, "reposition": [2]},
        {"drop_message": {"2": ["1"]}, "reposition": ["2"]},
        {"drop_rule": {"type": "message_drop", "drop_messages": {"2": [1.0]}}, "reposition": [2.0]},
    ],
)
def test_names_of_akv_s_code(fields: dict[str, Any]) -> None:
    assert edits(**fields) == Edits({2: (1,)}, (2,)) == edits(cache={"drop": {"2": [1]}, "reposition": [2]})


@pytest.mark.parametrize("value", [True, 1.5, "01", "1.0", -1])
def test_those_names_don_t_take_everything(value: Any) -> None:
    assert type(refusal(drop_message={"2": [value]})) is InvalidDrop


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": {"drop": {"2": [1]}}, "drop_message": {"2": [1]}},
        {"cache": {"drop": {"2": [1]}}, "reposition": [2]},
        {"cache": {"reposition": [2]}, "drop_rule": {"type": "message_drop", "drop_messages": {"2": [1]}}},
        {"drop_message": {"2": [1]}, "drop_rule": {"type": "message_drop", "drop_messages": {"2": [1]}}},
        {"cache": {"drop": {"2": [1]}}, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}] * 2}},
    ],
)
def test_two_spellings(fields: dict[str, Any]) -> None:
    assert type(refusal(**fields)) is ConflictingFields


@pytest.mark.parametrize("kind", ["text_drop", "keep_text_drop", "thinking_drop", "?"])
def test_other_rules(kind: str) -> None:
    error = refusal(drop_rule={"type": kind})
    assert (type(error), error.param) == (UnsupportedParameter, "drop_rule.type")


def test_clearing_old_tool_results() -> None:
    rule = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 30_000},
        "keep": {"type": "tool_uses", "value": 5},
        "clear_at_least": {"type": "input_tokens", "value": 1000},
        "exclude_tools": ["search"],
        "clear_tool_inputs": False,
    }
    assert edits(context_management={"edits": [rule]}).clear_tool_uses == ClearToolUses(30_000, 5, 1000, ("search",))
    default = edits(context_management={"edits": [{"type": rule["type"]}]})
    assert (default.clear_tool_uses, bool(default)) == (ClearToolUses(100_000, 3, 0), True)
    for wrong in ({"clear_tool_inputs": True}, {"type": "clear_thinking_20251015"}):
        assert type(refusal(context_management={"edits": [{**rule, **wrong}]})) is UnsupportedParameter
    unit = refusal(context_management={"edits": [{**rule, "keep": {"type": "input_tokens", "value": 3}}]})
    assert unit.param == "context_management.edits[0].keep.type"


@given(
    st.dictionaries(st.integers(0, 30), st.lists(st.integers(0, 30), max_size=4), max_size=4),
    st.sets(st.integers(0, MESSAGES - 1)),
)
def test_a_valid_schedule_arrives_as_it_was_sent(drop: dict[int, list[int]], reposition: set[int]) -> None:
    drop = {trigger: [m for m in ids if m <= trigger] for trigger, ids in drop.items()}
    cache = {"drop": {str(k): v for k, v in drop.items()}, "reposition": sorted(reposition)}
    arrived = edits(cache=cache)
    assert arrived == Edits({k: tuple(v) for k, v in drop.items()}, tuple(sorted(reposition)))
    assert count_ops({"cache": cache}) == sum(map(len, drop.values())) + len(reposition)
