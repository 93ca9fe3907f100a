"""Completion bodies, and what clients send that know this interface well."""

from __future__ import annotations

from typing import Any

import pytest

from kvweave.core.prompt import Document, Prompt
from kvweave.core.sampling import SamplingParams
from kvweave.errors import ConflictingFields, InvalidRequest, UnsupportedParameter
from kvweave.protocol.cache import Pin
from kvweave.protocol.completions import CompletionRequest, parse_completion
from kvweave.protocol.limits import Limits


def parse(**fields: Any) -> CompletionRequest:
    return parse_completion(fields, {})


def test_a_plain_request_has_openai_s_defaults() -> None:
    assert parse(prompt="Hello") == CompletionRequest(
        model=None, prompts=("Hello",), sampling=SamplingParams(max_tokens=16, temperature=1.0)
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_forms_of_a_prompt(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert parse(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [""], ["a", ""], [[1], []], 5, True, [True], [1.0], [-1], ["a", 1], {}]
)
def test_no_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse(prompt=prompt)


def test_segments() -> None:
    segments = [{"text": "Read: "}, {"text": "A text.", "cache": {"segment": "a", "pin": 60}}, {"text": "Why?"}]
    request = parse(segments=segments)
    document = Document("A text.", id="a")
    assert request.prompts == (Prompt(["Read: ", document, "Why?"]),)
    assert request.cache.pins == (Pin(60.0, strict=True, document=document),)
    assert request.operations == 1
    with pytest.raises(ConflictingFields):
        parse(segments=segments, prompt="a")
    for nothing in ([], [{"text": ""}], [{"text": "", "cache": {}}]):
        with pytest.raises(InvalidRequest):
            parse(segments=nothing)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache": {"drop": {"1": [0]}}}, "cache.drop"),
        ({"kv_cache": {"reposition": [0]}}, "kv_cache.reposition"),
        ({"drop_message": {"1": [0]}}, "drop_message"),
        ({"drop_rule": {"type": "message_drop"}}, "drop_rule"),
        ({"reposition": [1]}, "reposition"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"documents": [{"text": "a"}]}, "documents"),
    ],
)
def test_unsupported(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse(prompt="a", **fields)
    assert caught.value.param == param


def test_what_vllm_s_benchmark_sends() -> None:
    request = parse(
        model="m",
        prompt="a",
        temperature=0.0,
        repetition_penalty=1.0,
        max_tokens=128,
        logprobs=None,
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
    )
    assert (request.ignored, request.include_usage, request.sampling.ignore_eos) == ((), True, True)


def test_what_lm_eval_sends() -> None:
    body = {
        "prompt": [[1, 2, 3]],
        "model": "m",
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        "temperature": 0,
    }
    request = parse(**body)
    assert (request.echo, request.sampling.logprobs, request.sampling.greedy, request.ignored) == (True, 1, True, ())


def test_limits() -> None:
    with pytest.raises(InvalidRequest):
        parse_completion({"prompt": ["a", "b"]}, {}, Limits(parts=1))
    with pytest.raises(InvalidRequest):
        parse_completion({"segments": [{"text": "a"}, {"text": "b"}]}, {}, Limits(parts=1))


def test_unknown_fields() -> None:
    assert parse(prompt="a", x=1, best_of=1).ignored == ("x",)
    assert parse(segments=[{"text": "a", "y": 1}], prompt_cache_options={"mode": "m"}).ignored == (
        "segments[].y",
        "prompt_cache_options.mode",
    )
    with pytest.raises(InvalidRequest, match="x"):
        parse_completion({"prompt": "a", "x": 1}, {}, strict=True)
