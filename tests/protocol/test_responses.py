"""Answers are what the official client and lm_eval read."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvweave.core.report import Output, ReuseReport, TokenLogprob
from kvweave.protocol import responses
from kvweave.protocol.responses import Head
from kvweave.protocol.usage import usage_json

HEAD = Head("chatcmpl-1", 1_700_000_000, "m", "fp")
REPORT = ReuseReport("exact", "exact", "prefix", 4, cached_tokens=1, prefilled_tokens=3)
TEXTS = ("a", "é", "�", "�", "d", "e")
LOGPROBS = (TokenLogprob(4, -0.5, ((4, -0.5), (0, -1.5))), TokenLogprob(5, -math.inf, ((1, -0.25), (4, -2.0))))


def token_text(token: int) -> str:
    return TEXTS[token]


def output(**changes: Any) -> Output:
    fields: dict[str, Any] = {"text": "de", "token_ids": (4, 5), "finish_reason": "stop", "reuse": REPORT}
    return Output(**{**fields, "logprobs": LOGPROBS, "prompt_token_ids": (0, 1, 2, 3), **changes})


def strict(model: Any, body: dict[str, Any]) -> Any:
    """Through JSON, as a client gets it; every field checked, unlike in the client."""
    return model.model_validate(json.loads(json.dumps(body, allow_nan=False)), strict=False)


def test_a_chat_answer() -> None:
    choice = responses.chat_choice(output(index=1), responses.chat_message("de"), token_text)
    answer = strict(ChatCompletion, HEAD.chat_completion([choice], usage_json([REPORT], 2, 0), timings={"ttft_ms": 1.0}))
    assert (answer.id, answer.object, answer.model, answer.system_fingerprint) == (
        "chatcmpl-1",
        "chat.completion",
        "m",
        "fp",
    )
    assert (answer.choices[0].index, answer.choices[0].finish_reason) == (1, "stop")
    assert answer.choices[0].message.content == "de"
    assert (answer.usage.prompt_tokens_details.cached_tokens, answer.usage.total_tokens) == (1, 6)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("d", -0.5, [100])
    assert [(t.token, t.logprob) for t in first.top_logprobs] == [("d", -0.5), ("a", -1.5)]
    assert (second.logprob, second.top_logprobs[0].bytes) == (-9999.0, list("é".encode()))
    assert answer.model_extra == {"timings": {"ttft_ms": 1.0}}


def test_a_chat_answer_without_log_probabilities() -> None:
    choice = responses.chat_choice(output(), responses.chat_message(""))
    assert choice["logprobs"] is None
    assert "tool_calls" not in choice["message"]


def test_tool_calls_end_an_answer() -> None:
    calls = [responses.tool_call("c1", "f", '{"x": 1}')]
    choice = responses.chat_choice(output(), responses.chat_message(None, calls))
    answer = strict(ChatCompletion, HEAD.chat_completion([choice], usage_json([REPORT], 2, 0)))
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("c1", "f", '{"x": 1}')


def test_chat_chunks() -> None:
    delta = {"role": "assistant", "content": "d"}
    logprobs = responses.chat_logprobs(LOGPROBS[:1], token_text)
    chunk = strict(ChatCompletionChunk, HEAD.chat_chunk([responses.chat_delta(2, delta, logprobs=logprobs)]))
    assert (chunk.object, chunk.usage, chunk.choices[0].index) == ("chat.completion.chunk", None, 2)
    assert (chunk.choices[0].delta.role, chunk.choices[0].delta.content) == ("assistant", "d")
    assert chunk.choices[0].logprobs.content[0].token == "d"
    last = strict(ChatCompletionChunk, HEAD.chat_chunk([], usage=usage_json([REPORT], 2, 3)))
    assert (last.choices, last.usage.prompt_tokens_details.model_extra["cache_ops"]) == ([], 3)


def test_streamed_tool_calls_add_up() -> None:
    pieces = [("c1", "f", ""), (None, None, '{"x"'), (None, None, ": 1}")]
    deltas = [{"tool_calls": [responses.tool_call_delta(0, *piece)]} for piece in pieces]
    chunks = [strict(ChatCompletionChunk, HEAD.chat_chunk([responses.chat_delta(0, delta)])) for delta in deltas]
    calls = [chunk.choices[0].delta.tool_calls[0] for chunk in chunks]
    assert [(c.id, c.function.name) for c in calls] == [("c1", "f"), (None, None), (None, None)]
    assert "".join(c.function.arguments for c in calls) == '{"x": 1}'


def test_a_completion() -> None:
    logprobs = responses.completion_logprobs((4, 5), LOGPROBS, token_text)
    choice = responses.completion_choice(0, "de", "length", logprobs)
    answer = strict(Completion, HEAD.completion([choice], usage=usage_json([REPORT], 2, 0)))
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == ("text_completion", "de", "length")
    assert answer.choices[0].logprobs.tokens == ["d", "e"]
    assert answer.choices[0].logprobs.token_logprobs == [-0.5, -9999.0]
    assert answer.choices[0].logprobs.top_logprobs == [{"d": -0.5, "a": -1.5}, {"é": -0.25, "d": -2.0, "e": -9999.0}]
    assert answer.choices[0].logprobs.text_offset == [0, 1]


def test_chunks_of_a_completion_go_on_where_the_text_was() -> None:
    whole = responses.completion_logprobs((0, 1, 4), (None, *LOGPROBS), token_text)
    pieces, offset = [], 0
    for token, logprob in zip((0, 1, 4), (None, *LOGPROBS), strict=True):
        pieces.append(responses.completion_logprobs((token,), (logprob,), token_text, offset))
        offset += len(token_text(token))
    assert whole == {name: [value for piece in pieces for value in piece[name]] for name in whole}


def lm_eval_score(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """As lm_eval's ``local-completions`` does: the last token is the generated one it asks for and drops."""
    logprobs = choice["logprobs"]["token_logprobs"][context:-1]
    tops = choice["logprobs"]["top_logprobs"][context:-1]
    return sum(logprobs), all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))


@pytest.mark.parametrize(("second", "greedy"), [((3, -0.3), True), ((2, -0.3), True), ((1, -0.1), False)])
def test_echo_as_lm_eval_reads_it(second: tuple[int, float], greedy: bool) -> None:
    """Tokens 2 and 3 have the same text: the likelier of the two stands for it."""
    prompt = (
        None,
        TokenLogprob(1, -0.125, ((1, -0.125),)),
        TokenLogprob(2, -0.25, ((2, -0.25), (3, -0.3))),
        TokenLogprob(3, -0.3, (second,)),
    )
    one = output(prompt_logprobs=prompt, token_ids=(4,), logprobs=LOGPROBS[:1], text="d")
    text, logprobs = responses.echoed(one, "aé��", token_text)
    choice = json.loads(json.dumps(responses.completion_choice(0, text, "length", logprobs)))
    assert text == "aé��d"
    assert len(choice["logprobs"]["tokens"]) == 5
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert lm_eval_score(choice, 1) == (-0.125 - 0.25 - 0.3, greedy)


def test_echo_where_the_prompt_was_reused() -> None:
    text, logprobs = responses.echoed(output(prompt_logprobs=(None,) * 4), "abcd", token_text)
    assert text == "abcdde"
    assert logprobs is not None
    assert logprobs["token_logprobs"] == [None] * 4 + [-0.5, -9999.0]
    assert responses.echoed(output(), "abcd", None) == ("abcdde", None)


def test_models() -> None:
    entry = responses.model_entry(
        "m", root="org/m", created=1, max_model_len=2048, fingerprint="fp", reuse="exact", techniques={"epic": "closed"}
    )
    (model,) = [strict(Model, one) for one in responses.model_list([entry])["data"]]
    assert (model.id, model.object, model.owned_by) == ("m", "model", "kvweave")
    assert model.model_extra == {
        "root": "org/m",
        "max_model_len": 2048,
        "kvweave": {"fingerprint": "fp", "reuse": "exact", "techniques": [{"name": "epic", "gate": "closed"}]},
    }
