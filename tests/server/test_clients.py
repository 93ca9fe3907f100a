"""The official client against a real server: what it sends is understood, what it gets it can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from kvweave.core.report import Delta, Output, ReuseReport
from kvweave.protocol.responses import Head
from kvweave.server.chat import ChatForm
from kvweave.tools import get_parser
from tests.conftest import write_tiny_model
from tests.server.live import Live, live_server

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def live(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tiny_model_dir, tmp_path_factory.mktemp("home"), tool_parser="hermes") as server:
        yield server


@pytest.fixture
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**{**given, **options})


def test_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = ask(client)
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    streamed = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
    assert text == whole.choices[0].message.content
    assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_asynchronous_client(live: Live, client: openai.OpenAI) -> None:
    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as other:
            options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
            whole = await other.chat.completions.create(**options)
            chunks = [c async for c in await other.chat.completions.create(**options, stream=True)]
            return whole.choices[0].message.content or "", "".join(c.choices[0].delta.content or "" for c in chunks)

    whole, streamed = asyncio.run(both())
    assert whole == streamed == ask(client).choices[0].message.content


def test_log_probabilities(client: openai.OpenAI) -> None:
    found = ask(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(found) == 8
    assert all(len(token.top_logprobs) == 3 for token in found)
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in found)  # greedy takes the likeliest
    chunks = list(ask(client, logprobs=True, top_logprobs=3, stream=True))
    assert [c.choices[0].logprobs.content[0].logprob for c in chunks] == [token.logprob for token in found]


def test_samples_and_seeds(client: openai.OpenAI) -> None:
    options = {"n": 2, "seed": 11, "temperature": 1.0}
    first, second = (ask(client, **options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[0] != texts[1]
    assert texts != [choice.message.content for choice in ask(client, **{**options, "seed": 12}).choices]


def test_cache_options_in_the_extra_body(client: openai.OpenAI) -> None:
    part = {"type": "text", "text": "A passage about the weather in Paris.", "cache": {"segment": "doc:1"}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Say more."}]}]
    for spelling in ("cache", "kv_cache"):
        answer = ask(client, messages=messages, extra_body={spelling: {"explain": True, "reuse": "exact"}})
        assert answer.usage.prompt_tokens_details.model_extra["cache_ops"] == 3
        assert answer.model_extra["cache"]["segments"][0]["segment"] == "doc:1"
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 101}, openai.BadRequestError, "invalid_request"),
        ({"tool_choice": "required", "tools": [WEATHER]}, openai.BadRequestError, "unsupported_parameter"),
        ({"extra_body": {"cache": {"reuse": "fused", "fallback": "refuse"}}}, openai.ConflictError, "reuse_refused"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
def test_errors_arrive_as_the_client_s_own(client: openai.OpenAI, options: Any, error: Any, code: str) -> None:
    with pytest.raises(error) as caught:
        ask(client, **options)
    assert caught.value.code == code
    assert caught.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_fit_a_schema(client: openai.OpenAI, stream: bool) -> None:
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    answer = ask(client, response_format=wanted, max_tokens=200, temperature=1.0, seed=3, stream=stream)
    text = "".join(c.choices[0].delta.content for c in answer) if stream else answer.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}})
    assert caught.value.param == "response_format"


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="once upon", max_tokens=6, temperature=0, echo=True, logprobs=1)
    assert whole.choices[0].text.startswith("once upon")
    assert whole.choices[0].logprobs is not None
    chunks = list(client.completions.create(model="tiny", prompt="once upon", max_tokens=6, temperature=0, stream=True))
    assert "once upon" + "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    write_tiny_model(tmp_path, chat_template=template)
    with live_server(tmp_path, tmp_path) as live:
        body = {"messages": MESSAGES, "tools": [WEATHER], "max_tokens": 1}

        def tokens(**options: Any) -> int:
            return int(live.post("/v1/chat/completions", {**body, **options}).json()["usage"]["prompt_tokens"])

        assert tokens() == tokens(tool_choice="none") + len("[weather]")


ANSWER = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Paris"}}\n</tool_call>'
REPORT = ReuseReport("exact", "exact", "prefix", 1, prefilled_tokens=1)


def form() -> ChatForm:
    return ChatForm(Head("chatcmpl-1", 0, "tiny", "f"), None, get_parser("hermes"), [WEATHER])


def test_a_call_is_told_from_text() -> None:
    """What a model of random weights never writes is handed to the objects' writer directly."""
    whole = form().whole([[Output(ANSWER, (1,), "stop", REPORT)]], usage={})
    (choice,) = openai.types.chat.ChatCompletion.model_validate({**whole, "usage": None}).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"place": "Paris"}


def test_a_streamed_call_has_one_chunk_a_token() -> None:
    writer, output = form(), Output(ANSWER, (1,), "stop", REPORT)
    pieces = [Delta(ANSWER[i : i + 3], i) for i in range(0, len(ANSWER), 3)]
    pieces[-1] = replace(pieces[-1], output=output)
    chunks = [ChatCompletionChunk.model_validate(writer.chunk(0, piece)) for piece in pieces]
    assert len(chunks) == len(pieces)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0] * len(calls)
    assert (calls[0].id or "").startswith("call_")
    assert calls[0].function is not None
    assert calls[0].function.name == "weather"
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments) == {"place": "Paris"}
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
