"""Whatever JSON arrives, the parsers answer with a request or with one typed 400."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from kvweave.errors import RequestError
from kvweave.protocol.bodies import ChatCompletionBody, CompletionBody, TokenizeBody
from kvweave.protocol.chat import parse_chat
from kvweave.protocol.completions import parse_completion
from kvweave.protocol.errors import error_json
from kvweave.protocol.tokenize import parse_detokenize, parse_tokenize
from tests.protocol.cases import JSON, chat_body, completion_body, places, replaced

PLAIN = {"messages": [{"role": "user", "content": ""}]}
_KEYS = sorted({key for model in (ChatCompletionBody, CompletionBody, TokenizeBody) for key in model.model_fields})


def _outcome(parse: Callable[[Any], Any], body: Any) -> Any:
    """The request, or None for a refusal that can be sent."""
    try:
        return parse(body)
    except RequestError as error:
        status, answer, headers = error_json(error)
        assert status == 400
        assert headers["x-should-retry"] == "false"
        json.dumps(answer, allow_nan=False, ensure_ascii=False).encode()
        assert answer["error"]["message"].rstrip().endswith((".", "?", ")"))
        return None


def _chat(body: Any) -> Any:
    return parse_chat(body, {})


def _completion(body: Any) -> Any:
    return parse_completion(body, {})


@pytest.mark.parametrize("parse", [_chat, _completion, parse_tokenize, parse_detokenize])
def test_any_json_is_refused_or_parsed(parse: Callable[[Any], Any]) -> None:
    @given(JSON | st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=5), JSON, max_size=5))
    @settings(max_examples=150, deadline=None)
    def check(body: Any) -> None:
        _outcome(parse, body)

    check()


@pytest.mark.parametrize(("parse", "body"), [(_chat, chat_body()), (_completion, completion_body())])
def test_one_wrong_value_anywhere(parse: Callable[[Any], Any], body: dict[str, Any]) -> None:
    assert _outcome(parse, body) is not None
    paths = list(places(body))
    outcomes = set()

    @given(st.sampled_from(paths), JSON)
    @settings(max_examples=600, deadline=None)
    def check(path: tuple[Any, ...], value: Any) -> None:
        outcomes.add(_outcome(parse, replaced(body, path, value)) is None)

    check()
    assert outcomes == {True, False}  # not refused all the time, and not accepted all the time


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_any_header(value: Any) -> None:
    _outcome(
        lambda body: parse_chat(body, {"X-KV-Cache": json.dumps(value)}), {"messages": [{"role": "user", "content": ""}]}
    )


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_text_in_the_header(text: str) -> None:
    _outcome(lambda body: parse_chat(body, {"x-kv-cache": text}), PLAIN)


@pytest.mark.parametrize("nested", ["[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000])
def test_deep_nesting_in_the_header(nested: str) -> None:
    with pytest.raises(RequestError):
        parse_chat(PLAIN, {"X-KV-Cache": nested})


def test_deep_nesting_in_the_body() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RequestError, match="deeper than 100"):
        _chat({**chat_body(), "chat_template_kwargs": {"a": deep}})


@pytest.mark.parametrize(
    ("parse", "body", "model"), [(_chat, chat_body(), ChatCompletionBody), (_completion, completion_body(), CompletionBody)]
)
def test_what_is_accepted_fits_the_schema(parse: Callable[[Any], Any], body: dict[str, Any], model: type[BaseModel]) -> None:
    """OpenAPI doesn't forbid what the server takes."""
    schema = Draft202012Validator(model.model_json_schema())
    paths = list(places(body))

    @given(st.sampled_from(paths), JSON)
    @settings(max_examples=600, deadline=None)
    def check(path: tuple[Any, ...], value: Any) -> None:
        changed = replaced(body, path, value)
        if _outcome(parse, changed) is not None:
            assert schema.is_valid(changed), list(schema.iter_errors(changed))

    check()
    assert not schema.is_valid({**body, "temperature": "1"})
