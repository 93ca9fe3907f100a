"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.core.chat import Conversation
from kvweave.errors import ConflictingFields, InvalidRequest
from kvweave.protocol.bodies import DetokenizeBody, TokenizeBody
from kvweave.protocol.chat import parse_conversation
from kvweave.protocol.limits import Limits
from kvweave.protocol.segments import Segments
from kvweave.protocol.validation import validate


@dataclass(frozen=True)
class TokenizeRequest:
    """Either a ``prompt`` or a ``conversation``. ``add_special_tokens`` is for prompts: templates write their own."""

    model: str | None
    prompt: str | None
    conversation: Conversation | None
    add_special_tokens: bool = True
    return_token_strs: bool = False


@dataclass(frozen=True)
class DetokenizeRequest:
    model: str | None
    tokens: tuple[int, ...]


def parse_tokenize(body: Mapping[str, Any], limits: Limits | None = None) -> TokenizeRequest:
    """Raises ``RequestError``s."""
    limits = limits or Limits()
    checked = validate(TokenizeBody, body)
    if (checked.prompt is None) == (checked.messages is None):
        if checked.prompt is None:
            raise InvalidRequest("prompt is missing. Send prompt or messages.", param="prompt")
        raise ConflictingFields("prompt and messages exclude each other. Send one of them.", param="messages")
    conversation = None if checked.messages is None else parse_conversation(checked, body, Segments(limits), limits)
    return TokenizeRequest(
        model=checked.model,
        prompt=checked.prompt,
        conversation=conversation,
        add_special_tokens=checked.add_special_tokens is not False,
        return_token_strs=bool(checked.return_token_strs),
    )


def parse_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """Raises ``RequestError``s."""
    checked = validate(DetokenizeBody, body)
    return DetokenizeRequest(checked.model, tuple(checked.tokens))


def tokenized(tokens: Sequence[int], max_model_len: int, token_strs: Sequence[str] | None = None) -> dict[str, Any]:
    return {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": list(tokens),
        "token_strs": None if token_strs is None else list(token_strs),
    }


def detokenized(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt}
