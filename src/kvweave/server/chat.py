"""``POST /v1/chat/completions``."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvweave.core.report import Delta, Output
from kvweave.core.sampling import ConstraintFactory
from kvweave.protocol.chat import ChatRequest, ResponseFormat, parse_chat
from kvweave.protocol.responses import (
    Head,
    TokenText,
    chat_choice,
    chat_delta,
    chat_logprobs,
    chat_message,
    tool_call,
    tool_call_delta,
)
from kvweave.server.access import Infer, parse_json, server_of
from kvweave.server.describe import answers, takes
from kvweave.server.front import note_of
from kvweave.server.prepare import Arrival, Wanted, chat_job, check_model
from kvweave.server.respond import Accepted, respond
from kvweave.server.state import ServerState
from kvweave.tools import StreamingToolParser, ToolCallDelta, ToolParser
from kvweave.tools.base import Tools

router = APIRouter()
PATH = "/v1/chat/completions"


@router.post(PATH, openapi_extra=takes("ChatCompletionBody"), responses=answers("chat.completion", stream=True))
async def chat_completions(request: Request, caller: Infer) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    state = server_of(request)
    raw = await request.body()
    arrival = Arrival(f"chatcmpl-{secrets.token_hex(12)}", note_of(request).request_id, PATH, caller)
    headers = dict(request.headers)
    return await respond(state, request, caller, arrival.start, lambda: _accept(state, arrival, raw, headers))


def _accept(state: ServerState, arrival: Arrival, raw: bytes, headers: Mapping[str, str]) -> Accepted:
    settings = state.settings
    call = parse_chat(parse_json(raw), headers, state.limits, settings.strict_fields)
    check_model(state, call.model)
    parser = state.tool_parser if call.tool_choice == "auto" else None
    sampling = call.sampling
    if parser is not None and parser.needs_special_tokens:
        sampling = replace(sampling, skip_special_tokens=False)
    wanted = Wanted(
        sampling=sampling,
        cache=call.cache,
        samples=call.samples,
        ignored=call.ignored,
        operations=call.operations,
        constraint=_constraint(state, call.response_format),
    )
    conversation = call.conversation if call.tool_choice == "auto" else replace(call.conversation, tools=())
    return Accepted(
        jobs=(chat_job(state, arrival, conversation, wanted),),
        form=ChatForm(state.head(arrival.id), _token_text(state, call), parser, conversation.tools),
        cache=call.cache,
        ignored=call.ignored,
        operations=call.operations,
        stream=call.stream,
        include_usage=call.include_usage,
        continuous_usage=call.continuous_usage,
    )


def _constraint(state: ServerState, wanted: ResponseFormat | None) -> ConstraintFactory | None:
    if wanted is None:
        return None
    return state.grammars.json_object() if wanted.schema is None else state.grammars.json_schema(wanted.schema)


def _token_text(state: ServerState, call: ChatRequest) -> TokenText | None:
    return None if call.sampling.logprobs is None else state.token_text


class ChatForm:
    """OpenAI's objects for one conversation; calls of ``tools`` are told from text by ``parser``."""

    def __init__(
        self, head: Head, token_text: TokenText | None = None, parser: ToolParser | None = None, tools: Tools = ()
    ) -> None:
        self._head = head
        self._token_text = token_text
        self._parser = parser
        self._tools = tools
        self._begun: set[int] = set()
        self._calling: set[int] = set()
        self._parsers: dict[int, StreamingToolParser] = {}

    def whole(self, outputs: Sequence[Sequence[Output]], **more: Any) -> dict[str, Any]:
        choices = [chat_choice(output, self._message(output), self._token_text) for output in outputs[0]]
        return self._head.chat_completion(choices, more.pop("usage"), **more)

    def chunk(self, prompt: int, piece: Delta, **more: Any) -> dict[str, Any]:
        """One sampled token."""
        delta: dict[str, Any] = {} if piece.index in self._begun else {"role": "assistant"}
        self._begun.add(piece.index)
        delta |= self._content(piece)
        reason = None if piece.output is None else piece.output.finish_reason
        if reason is not None and piece.index in self._calling:
            reason = "tool_calls"
        logprobs = None
        if self._token_text is not None and piece.logprob is not None:
            logprobs = chat_logprobs([piece.logprob], self._token_text)
        return self._head.chat_chunk([chat_delta(piece.index, delta, reason, logprobs)], **more)

    def tail(self, **more: Any) -> dict[str, Any]:
        return self._head.chat_chunk([], **more)

    def _message(self, output: Output) -> dict[str, Any]:
        if self._parser is None:
            return chat_message(output.text)
        parsed = self._parser.parse(output.text, self._tools)
        return chat_message(parsed.content, [tool_call(c.id, c.name, c.arguments) for c in parsed.tool_calls])

    def _content(self, piece: Delta) -> dict[str, Any]:
        if self._parser is None:
            return {"content": piece.text}
        stream = self._parsers.setdefault(piece.index, self._parser.stream(self._tools))
        found = [*stream.push(piece.text), *(stream.flush() if piece.output is not None else ())]
        calls = [c for c in found if isinstance(c, ToolCallDelta)]
        text = "".join(c.text for c in found if not isinstance(c, ToolCallDelta))
        if not calls:
            return {"content": text}
        self._calling.add(piece.index)
        deltas = [tool_call_delta(c.index, c.id, c.name, c.arguments) for c in calls]
        return {**({"content": text} if text else {}), "tool_calls": deltas}
