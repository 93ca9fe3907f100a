"""Messages about bodies: they name the place and what belongs there, and show nobody's text."""

from __future__ import annotations

from typing import Any

import pytest

from kvweave.errors import InvalidRequest, RequestError, UnknownCacheField, UnsupportedContent, UnsupportedParameter
from kvweave.protocol.chat import parse_chat
from kvweave.protocol.completions import parse_completion

USER = {"role": "user", "content": "Hello"}


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_chat({"messages": [USER], **fields}, {})
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": "1"}, "temperature", "temperature: expected a number, got a string."),
        ({"temperature": True}, "temperature", "expected a number, got true"),
        ({"temperature": float("nan")}, "temperature", "finite number"),
        ({"temperature": 101}, "temperature", "expected at most 100, got 101"),
        ({"top_p": 0}, "top_p", "expected a number above 0, got 0"),
        ({"max_tokens": 1.0}, "max_tokens", "expected an integer, got 1.0"),
        ({"max_tokens": -1}, "max_tokens", "expected 0 or more, got -1"),
        ({"seed": 2**63}, "seed", "expected at most 9.22337e+18"),
        ({"stop": 5}, "stop", "expected a string or a list, got 5"),
        ({"stop": ["a"] * 17}, "stop", "expected at most 16 entries, got 17"),
        ({"stop": ["a", 1]}, "stop[1]", "expected a string, got 1"),
        ({"stop": [""]}, "stop[0]", "at least 1 characters, got 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "got 'x'"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7", "expected at most 100, got 101"),
        ({"messages": []}, "messages", "expected at least 1 entries, got 0"),
        ({"messages": None}, "messages", "expected a list, got null"),
        ({"messages": ["Hello"]}, "messages[0]", "expected an object, got a string"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "messages[0].role", "got 'usr'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", 'Send ""'),
        ({"messages": [USER, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text", "is missing"),
        ({"messages": [{"role": "user", "content": "a", "cache": {}}]}, "messages[0].cache", "belong on content parts"),
        ({"n": 9}, "n", "at most 8, got 9"),
        ({"top_logprobs": 2}, "top_logprobs", "Send logprobs: true"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "0 to max_tokens"),
        ({"stream_options": {}}, "stream_options", "Send stream: true"),
        ({"user": "\ud800"}, "user", "half a surrogate pair at character 0"),
        ({"max_tokens": 10**400 + 1, "top_k": -(10**400)}, "top_k", "got a huge integer"),
    ],
)
def test_invalid_values(fields: dict[str, Any], param: str, says: str) -> None:
    error = refusal(**fields)
    assert type(error) is InvalidRequest
    assert error.param == param
    assert says in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"segments": [{"text": "a"}]}, "segments"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"metadata": {"kv_cache": "{}"}}, "metadata.kv_cache"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ],
)
def test_unsupported_values(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert type(error) is UnsupportedParameter
    assert error.param == param


@pytest.mark.parametrize("nothing", [None, [], {}, ""])
@pytest.mark.parametrize("field", ["functions", "function_call", "audio", "prediction", "web_search_options", "moderation"])
def test_unsupported_fields_may_be_empty(field: str, nothing: Any) -> None:
    assert parse_chat({"messages": [USER], field: nothing}, {}).ignored == ()


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal", "new_kind"])
def test_parts_that_are_not_text(kind: str) -> None:
    error = refusal(messages=[USER, {"role": "user", "content": [{"type": kind, kind: {}}]}])
    assert type(error) is UnsupportedContent
    assert error.param == "messages[1].content[0].type"


def test_unknown_cache_fields_name_the_nearest() -> None:
    error = refusal(cache={"repositon": [1]})
    assert type(error) is UnknownCacheField
    assert str(error) == "cache.repositon is not a field of cache. Did you mean cache.reposition?"
    part = {"type": "text", "text": "a", "cache": {"segmnt": "x"}}
    error = refusal(messages=[{"role": "user", "content": [part]}])
    assert error.param == "messages[0].content[0].cache.segmnt"
    assert "Did you mean" in str(error)


@pytest.mark.parametrize("key", ["no-cache", "s-maxage", "namespace"])
def test_keys_of_response_caches_get_a_hint(key: str) -> None:
    assert "kv_cache" in str(refusal(cache={key: 1}))


def test_texts_are_not_shown() -> None:
    secret = "my secret question"
    for fields in ({"messages": secret}, {"max_tokens": secret}, {"messages": [{"role": "user", "content": [secret]}]}):
        assert secret not in str(refusal(**fields))


@pytest.mark.parametrize("body", [None, [], "text", 3, {1: 2}])
def test_bodies_that_are_no_objects(body: Any) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidRequest):
            parse(body, {})
