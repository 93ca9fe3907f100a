"""Chat requests: from a body to a conversation, sampling parameters and cache options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document
from kvweave.core.sampling import SamplingParams
from kvweave.errors import ConflictingFields, InvalidRequest, UnsupportedParameter
from kvweave.protocol.bodies import ChatCompletionBody, ResponseFormatBody, TokenizeBody
from kvweave.protocol.bodies import Message as MessageBody
from kvweave.protocol.cache import CacheOptions, cache_options, receive
from kvweave.protocol.ignored import ignored_fields
from kvweave.protocol.limits import Limits
from kvweave.protocol.sampling import UNLIMITED, samples, sampling_params, stream_usage
from kvweave.protocol.segments import Segments
from kvweave.protocol.validation import validate

_FOR_TEMPLATES = ("name", "tool_call_id", "tool_calls", "reasoning_content")
_NOT_KWARGS = frozenset(
    ("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)


@dataclass(frozen=True)
class ResponseFormat:
    """What the answer must be: any JSON object (``schema`` None), or one that fits a JSON schema."""

    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A checked chat request. ``ignored`` names unknown fields, ``operations`` counts cache operations for usage.

    ``sampling.max_tokens`` is ``UNLIMITED`` where the body names none.
    """

    model: str | None
    conversation: Conversation
    sampling: SamplingParams
    samples: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    response_format: ResponseFormat | None = None
    tool_choice: Literal["none", "auto"] = "none"
    cache: CacheOptions = field(default_factory=CacheOptions)
    ignored: tuple[str, ...] = ()
    operations: int = 0


def parse_chat(
    body: Mapping[str, Any], headers: Mapping[str, str], limits: Limits | None = None, strict: bool = False
) -> ChatRequest:
    """Check the body of a chat completion request, any JSON value. Raises ``RequestError``s with ``param``.

    ``strict``: unknown fields are errors, too. Defaults are those of OpenAI's interface, temperature 1.0 among them.
    """
    limits = limits or Limits()
    if isinstance(body, Mapping) and isinstance(listed := body.get("messages"), list):
        _check_count(len(listed), 0, limits)  # before each of them is looked at
    checked = validate(ChatCompletionBody, body)
    received = receive(checked, body, headers, limits)
    segments = Segments(limits)
    conversation = parse_conversation(checked, body, segments, limits)
    ignored = ignored_fields(checked, _nested(checked), strict)
    include_usage, continuous_usage = stream_usage(checked)
    return ChatRequest(
        model=checked.model,
        conversation=conversation,
        sampling=sampling_params(checked, max_tokens=_max_tokens(checked), logprobs=_logprobs(checked)),
        samples=samples(checked, limits),
        stream=bool(checked.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        response_format=_response_format(checked.response_format),
        tool_choice="none" if not checked.tools or checked.tool_choice == "none" else "auto",
        cache=cache_options(received, tuple(segments.pins), len(checked.messages), limits),
        ignored=ignored,
        operations=received.operations,
    )


def _check_count(messages: int, parts: int, limits: Limits) -> None:
    if messages > limits.messages or parts > limits.parts:
        raise InvalidRequest(
            f"messages: {messages:,} with {parts:,} parts, the limits are {limits.messages:,} and {limits.parts:,}. "
            "Join texts, or leave old messages out.",
            param="messages",
        )


def parse_conversation(
    body: ChatCompletionBody | TokenizeBody, raw: Mapping[str, Any], segments: Segments, limits: Limits
) -> Conversation:
    """What the template renders. Tools and calls are handed over as they came, since templates print them.

    ``segments`` takes what is marked. Raises ``RequestError``s.
    """
    messages = body.messages or []
    parts = sum(len(m.content) for m in messages if isinstance(m.content, list))
    _check_count(len(messages), parts, limits)
    if body.continue_final_message and body.add_generation_prompt:
        raise ConflictingFields(
            "continue_final_message and add_generation_prompt exclude each other. Send one of them.",
            param="add_generation_prompt",
        )
    add_prompt = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return Conversation(
        messages=tuple(
            Message(m.role, _content(m, i, segments), _extra(sent))
            for i, (m, sent) in enumerate(zip(messages, raw.get("messages") or (), strict=True))
        ),
        tools=tuple(raw.get("tools") or ()),
        documents=segments.documents(body.documents or ()),
        add_generation_prompt=add_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=_template_kwargs(body),
    )


def _content(message: MessageBody, index: int, segments: Segments) -> str | Sequence[str | Document] | None:
    if message.content is None:
        if not message.tool_calls:
            raise InvalidRequest(
                f'messages[{index}].content: null is for an assistant that calls tools. Send "" or leave the message out.',
                param=f"messages[{index}].content",
            )
        return None
    if isinstance(message.content, str):
        return message.content
    return tuple(segments.part(part, index, i) for i, part in enumerate(message.content))


def _extra(sent: Mapping[str, Any]) -> dict[str, Any]:
    return {name: sent[name] for name in _FOR_TEMPLATES if sent.get(name) is not None}


def _template_kwargs(body: ChatCompletionBody | TokenizeBody) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    if taken := sorted(_NOT_KWARGS & kwargs.keys()):
        raise UnsupportedParameter(
            f"chat_template_kwargs.{taken[0]} can't be set there. Use the field of the request, where there is one.",
            param=f"chat_template_kwargs.{taken[0]}",
        )
    if (effort := body.reasoning_effort) is not None and kwargs.setdefault("reasoning_effort", effort) != effort:
        raise ConflictingFields(
            "reasoning_effort and chat_template_kwargs.reasoning_effort differ. Send only reasoning_effort.",
            param="chat_template_kwargs.reasoning_effort",
        )
    return kwargs


def _max_tokens(body: ChatCompletionBody) -> int:
    given = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(given) > 1:
        raise ConflictingFields("max_tokens and max_completion_tokens differ. Send only one of them.", param="max_tokens")
    return min((UNLIMITED, *given))


def _logprobs(body: ChatCompletionBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs. Send logprobs: true with it.", param="top_logprobs")
    return None


def _response_format(body: ResponseFormatBody | None) -> ResponseFormat | None:
    if body is None or body.type == "text":
        return None
    if body.type == "json_object":
        return ResponseFormat()
    if body.json_schema is None:
        raise InvalidRequest(
            "response_format.json_schema is missing. Send an object with name and schema.",
            param="response_format.json_schema",
        )
    return ResponseFormat(body.json_schema.schema_)


def _nested(body: ChatCompletionBody) -> Iterator[tuple[str, BaseModel]]:
    """Objects in a body that may have unknown fields, with their place."""
    for message in body.messages:
        yield "messages[].", message
        for part in message.content if isinstance(message.content, list) else ():
            yield "messages[].content[].", part
    for document in body.documents or ():
        yield "documents[].", document
