"""``/tokenize``, ``/detokenize`` and ``/v1/chat/completions/render``: what a model reads, without running it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvweave.core.prompt import Prompt
from kvweave.models.chat_template import Rendered
from kvweave.protocol.chat import parse_chat
from kvweave.protocol.tokenize import detokenized, parse_detokenize, parse_tokenize, tokenized
from kvweave.server.access import caller_with, parse_json, server_of
from kvweave.server.describe import answers, takes
from kvweave.server.prepare import check_model, owners_of, tokens_of
from kvweave.server.respond import on_worker
from kvweave.server.state import ServerState

router = APIRouter(dependencies=[Depends(caller_with("infer"))])


@router.post("/v1/chat/completions/render", openapi_extra=takes("ChatCompletionBody"), responses=answers("chat.render"))
async def render(request: Request) -> Response:
    """The text and the ids of a conversation, its pieces, and which message each token belongs to (null: unknown)."""
    state, headers = server_of(request), dict(request.headers)
    return JSONResponse(await on_worker(state, _render, state, await request.body(), headers))


@router.post("/tokenize", openapi_extra=takes("TokenizeBody"), responses=answers())
async def tokenize(request: Request) -> Response:
    """Ids of a prompt or of a conversation."""
    state = server_of(request)
    return JSONResponse(await on_worker(state, _tokenize, state, await request.body()))


@router.post("/detokenize", openapi_extra=takes("DetokenizeBody"), responses=answers())
async def detokenize(request: Request) -> Response:
    """Text of ids."""
    state = server_of(request)
    return JSONResponse(await on_worker(state, _detokenize, state, await request.body()))


def _render(state: ServerState, raw: bytes, headers: dict[str, str]) -> dict[str, Any]:
    call = parse_chat(parse_json(raw), headers, state.limits, state.settings.strict_fields)
    check_model(state, call.model)
    rendered = state.llm.tokenizer.render(call.conversation)
    tokens = state.llm.tokenizer.tokenise(rendered.prompt)
    pieces, start = [], 0
    for span in tokens.spans:
        stop = start + len(span.token_ids)
        document = span.document
        kind, label = ("text", None) if document is None else (document.kind, document.id)
        pieces.append({"kind": kind, "segment": label, "span": [start, stop]})
        start = stop
    return {
        "object": "chat.render",
        "model": state.model_name,
        "text": rendered.text,
        "token_ids": list(tokens.token_ids),
        "pieces": pieces,
        "owners": owners_of(state, rendered),
        "template_opaque": rendered.opaque,
    }


def _tokenize(state: ServerState, raw: bytes) -> dict[str, Any]:
    call = parse_tokenize(parse_json(raw), state.limits)
    check_model(state, call.model)
    if call.conversation is not None:
        rendered: Rendered = state.llm.tokenizer.render(call.conversation)
        ids = state.llm.tokenizer.tokenise(rendered.prompt).token_ids
    elif call.prompt:
        ids = tokens_of(state, Prompt(call.prompt, add_bos=call.add_special_tokens)).token_ids
    else:
        ids = ()
    texts = [state.token_text(token) for token in ids] if call.return_token_strs else None
    return tokenized(ids, state.llm.engine.parts.context_length, texts)


def _detokenize(state: ServerState, raw: bytes) -> dict[str, Any]:
    call = parse_detokenize(parse_json(raw))
    check_model(state, call.model)
    ids = tokens_of(state, call.tokens).token_ids if call.tokens else ()
    return detokenized(state.llm.tokenizer.decode(ids, skip_special_tokens=False))
