"""The client's helpers: the same count as the server's, and a loud error where a gateway removed something."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from openai.types.chat import ChatCompletion

from kvweave.client import OperationsLost, check_delivery, count_ops
from kvweave.protocol.chat import parse_chat
from kvweave.protocol.completions import parse_completion
from tests.protocol.cases import JSON, chat_body, completion_body


def answer(operations: Any) -> dict[str, Any]:
    details = {"cached_tokens": 0} if operations is None else {"cached_tokens": 0, "cache_ops": operations}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": details}
    message = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": usage}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 0),
        ({"cache": None, "documents": []}, 0),
        ({"cache": {"drop": {}, "reposition": [], "reuse": None}}, 0),
        ({"cache": {"reuse": "fused", "explain": False}}, 2),
        ({"kv_cache": {"drop": {"3": [1, 2], "5": [4]}, "reposition": [3, 5]}}, 5),
        ({"drop_message": {"3": [1, 2]}, "reposition": [3]}, 3),
        ({"drop_rule": {"type": "message_drop", "drop_messages": {"3": [1, 2]}}}, 2),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 1),
        ({"documents": [{"text": "a"}, {"text": "b", "cache": {"pin": 5}}]}, 2),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "x"}, "cache_control": {}}, 2),
        ({"messages": [{"content": [{"text": "a", "cache": {}}, {"text": "b", "cache_control": {}}, {"text": "c"}]}]}, 2),
        ({"segments": [{"text": "a", "cache": {}}, {"text": "b"}]}, 1),
        ({"cache_salt": "s", "prompt_cache_key": "k"}, 0),
        ({"extra_body": {"cache": {"reuse": "fused"}, "documents": [{"text": "a"}]}}, 2),
    ],
)
def test_counting(body: dict[str, Any], count: int) -> None:
    assert count_ops(body) == count


def test_the_server_counts_the_same() -> None:
    body = chat_body()
    assert parse_chat(body, {}).operations == count_ops(body) == 8 + 3 + 1
    body = completion_body()
    assert parse_completion(body, {}).operations == count_ops(body) == 4


@given(JSON, JSON, JSON)
def test_counting_takes_anything(one: Any, other: Any, third: Any) -> None:
    body = {"cache": one, "messages": [other, {"content": [third]}], "drop_rule": other, "extra_body": third}
    before = copy.deepcopy(body)
    assert count_ops(body) >= 0
    assert repr(body) == repr(before)


@pytest.mark.parametrize("wrap", [dict, ChatCompletion.model_validate])
def test_delivery(wrap: Any) -> None:
    body = {"cache": {"drop": {"3": [1]}, "reposition": [3]}}
    check_delivery(body, wrap(answer(2)))
    with pytest.raises(OperationsLost, match=r"Sent 2 cache operations, the server saw 0.*kv_cache"):
        check_delivery(body, wrap(answer(0)))
    with pytest.raises(OperationsLost, match="does not say"):
        check_delivery(body, wrap(answer(None)))
    check_delivery({}, wrap(answer(None)))


def test_no_usage_at_all() -> None:
    with pytest.raises(OperationsLost):
        check_delivery({"cache": {"reuse": "fused"}}, {"choices": []})


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, kvweave.client; print(sorted({'torch', 'pydantic', 'transformers', 'numpy'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
