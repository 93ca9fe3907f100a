"""Chat bodies become conversations, sampling parameters and options."""

from __future__ import annotations

from typing import Any

import pytest

from kvweave.core.chat import Message
from kvweave.core.prompt import Document
from kvweave.core.sampling import SamplingParams
from kvweave.errors import ConflictingFields, InvalidRequest
from kvweave.protocol.bodies import ChatCompletionBody
from kvweave.protocol.chat import ChatRequest, ResponseFormat, parse_chat
from kvweave.protocol.ignored import MAX_NAMED
from kvweave.protocol.limits import Limits
from kvweave.protocol.sampling import UNLIMITED
from tests.protocol.cases import chat_body

USER = {"role": "user", "content": "Hello"}


def parse(**fields: Any) -> ChatRequest:
    return parse_chat({"messages": [USER], **fields}, {})


def test_a_plain_request_has_openai_s_defaults() -> None:
    request = parse()
    assert request == ChatRequest(
        model=None, conversation=request.conversation, sampling=SamplingParams(max_tokens=UNLIMITED, temperature=1.0)
    )
    assert request.conversation.messages == (Message("user", "Hello"),)
    assert request.conversation.add_generation_prompt
    assert not request.cache.given


def test_every_field_arrives() -> None:
    request = parse_chat(chat_body(), {})
    assert request.model == "m"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (5, 0, 0.5, 1)
    assert (sampling.stop, sampling.logit_bias, sampling.logprobs) == (("\n",), {5: 1.5}, 3)
    assert (request.samples, request.stream, request.include_usage, request.continuous_usage) == (2, True, True, True)
    assert request.response_format == ResponseFormat({"type": "object"})
    assert request.tool_choice == "auto"
    assert request.conversation.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert request.conversation.documents == (Document("More text.", id="doc:b", title="T"),)
    system, user, assistant, tool = request.conversation.messages
    assert system.content == "Be brief."
    assert user.content == (Document("A document.", id="doc:a"), "Another.", "A question?")
    assert assistant.content is None
    assert assistant.extra["tool_calls"] == chat_body()["messages"][2]["tool_calls"]
    assert tool.extra == {"tool_call_id": "c1", "name": "f"}


def test_tools_reach_the_template_as_they_came() -> None:
    tool = {"type": "function", "x": 1, "function": {"parameters": {"b": 1, "a": 2}, "name": "f", "y": [None]}}
    tools = parse(tools=[tool]).conversation.tools
    assert [list(t["function"]) for t in tools] == [["parameters", "name", "y"]]
    assert tools == (tool,)


@pytest.mark.parametrize(
    ("fields", "choice"),
    [({}, "none"), ({"tools": []}, "none"), ({"tool_choice": "auto"}, "none")],
)
def test_without_tools_there_is_no_choice(fields: dict[str, Any], choice: str) -> None:
    assert parse(**fields).tool_choice == choice


def test_tools_may_be_switched_off() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert parse(tools=[tool]).tool_choice == "auto"
    request = parse(tools=[tool], tool_choice="none")
    assert (request.tool_choice, len(request.conversation.tools)) == ("none", 1)


def test_null_equals_absence() -> None:
    optional = [name for name, field in ChatCompletionBody.model_fields.items() if not field.is_required()]
    assert parse(**dict.fromkeys(optional)) == parse()


def test_max_tokens_has_two_names() -> None:
    assert parse(max_tokens=3, max_completion_tokens=3).sampling.max_tokens == 3
    assert parse(max_completion_tokens=0).sampling.max_tokens == 0
    with pytest.raises(ConflictingFields):
        parse(max_tokens=3, max_completion_tokens=4)


def test_logprobs() -> None:
    assert parse(logprobs=True).sampling.logprobs == 0
    assert parse(logprobs=True, top_logprobs=2).sampling.logprobs == 2
    assert parse(logprobs=False, top_logprobs=0).sampling.logprobs is None


def test_response_formats() -> None:
    assert parse(response_format={"type": "text"}).response_format is None
    assert parse(response_format={"type": "json_object"}).response_format == ResponseFormat()
    with pytest.raises(InvalidRequest, match=r"json_schema is missing"):
        parse(response_format={"type": "json_schema"})


def test_continuing_the_last_message() -> None:
    conversation = parse(continue_final_message=True).conversation
    assert (conversation.continue_final_message, conversation.add_generation_prompt) == (True, False)
    with pytest.raises(ConflictingFields):
        parse(continue_final_message=True, add_generation_prompt=True)


def test_reasoning_effort_has_one_value() -> None:
    with pytest.raises(ConflictingFields):
        parse(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})


def test_unknown_fields_are_named() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}], "refusal": None, "y": 2}
    body = {"messages": [message, message], "no_stop_trim": True, "empty": [], "prompt_cache_options": {"mode": "explicit"}}
    names = ("no_stop_trim", "messages[].y", "messages[].content[].x", "prompt_cache_options.mode")
    assert parse_chat(body, {}).ignored == names
    with pytest.raises(InvalidRequest, match="no_stop_trim"):
        parse_chat(body, {}, strict=True)


def test_names_of_unknown_fields_are_safe_in_a_header() -> None:
    (name,) = parse(**{"évil\r\nset-cookie: " + "x" * 100: 1}).ignored
    assert name.isascii()
    assert name.isprintable()
    assert len(name) <= 60


def test_not_all_unknown_fields_are_named() -> None:
    assert len(parse(**{f"field{i}": 1 for i in range(1000)}).ignored) == MAX_NAMED


def test_what_a_client_echoes_is_not_unknown() -> None:
    """An answer of the openai client, sent back as a message, has more fields than a request has."""
    echoed = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert parse(messages=[USER, {**echoed, "tool_calls": None}, USER]).ignored == ()


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        (Limits(messages=1), {"messages": [USER, USER]}),
        (Limits(parts=1), {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]}),
        (Limits(segments=1), {"documents": [{"text": "a"}, {"text": "b"}]}),
        (Limits(samples=1), {"n": 2}),
    ],
)
def test_limits(limits: Limits, fields: dict[str, Any]) -> None:
    parse(**fields)
    with pytest.raises(InvalidRequest):
        parse_chat({"messages": [USER], **fields}, {}, limits)


def test_too_many_messages_are_refused_before_any_is_looked_at() -> None:
    with pytest.raises(InvalidRequest, match="limits"):
        parse_chat({"messages": [None] * 5000}, {})
