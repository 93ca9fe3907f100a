"""Answers as OpenAI's and vLLM's clients read them: whole objects and chunks of streams, as plain dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.core.report import Output, TokenLogprob

TokenText = Callable[[int], str]
"""Text of one token id on its own."""

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON doesn't have; vLLM's value."""


@dataclass(frozen=True)
class Head:
    """What all objects of one answer begin with. ``created`` in seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }

    def chat_completion(self, choices: list[dict[str, Any]], usage: dict[str, Any], **more: Any) -> dict[str, Any]:
        """``more``: ``cache`` and ``timings``, if they were asked for."""
        return self._object("chat.completion", choices, usage=usage, **more)

    def chat_chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """``more``: ``usage``, ``cache``, ``timings``. The chunk with the final usage has no choices."""
        return self._object("chat.completion.chunk", choices, **more)

    def completion(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole answer, or a chunk of a stream, which has the same shape."""
        return self._object("text_completion", choices, **more)


def chat_choice(output: Output, message: dict[str, Any], token_text: TokenText | None = None) -> dict[str, Any]:
    """One sample of a chat answer; ``token_text`` if log probabilities were asked for."""
    reason = "tool_calls" if message.get("tool_calls") else output.finish_reason
    logprobs = None if token_text is None else chat_logprobs(output.logprobs or (), token_text)
    return {"index": output.index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def chat_delta(
    index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A piece of one sample. ``delta``: ``role`` in the first one, ``content``, ``tool_calls``."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_message(content: str | None, tool_calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    return {**message, "tool_calls": list(tool_calls)} if tool_calls else message


def tool_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """``arguments`` as JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_call_delta(index: int, id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """``id`` and ``name`` in the first piece of a call alone."""
    if name is None:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_logprobs(tokens: Iterable[TokenLogprob], token_text: TokenText) -> dict[str, Any]:
    """OpenAI's shape for chat."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": list(text.encode(errors="replace"))}

    content = [
        {**entry(t.token_id, t.logprob), "top_logprobs": [entry(other, logprob) for other, logprob in t.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_choice(
    index: int, text: str, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One sample of a completion, or a piece of it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], token_text: TokenText, offset: int = 0
) -> dict[str, Any]:
    """OpenAI's shape for completions: lists with one entry a token, null where nothing is known.

    With ``echo`` the prompt's tokens stand in front, the first of them without a log probability, as lm_eval
    (``LocalCompletionsAPI.parse_logprobs``) reads it: it compares the values of ``top_logprobs`` and ``token_logprobs`` with
    ``==``. ``top_logprobs`` has the token itself in any case, and of tokens with one text the likeliest. ``offset``:
    characters in front of the first token.
    """
    texts = [token_text(token) for token in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if t is None else max(t.logprob, _LOWEST) for t in logprobs],
        "top_logprobs": [None if t is None else _top(t, token_text) for t in logprobs],
        "text_offset": offsets,
    }


def _top(token: TokenLogprob, token_text: TokenText) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in sorted((*token.top, (token.token_id, token.logprob)), key=lambda item: -item[1]):
        top.setdefault(token_text(token_id), max(logprob, _LOWEST))
    return top


def echoed(output: Output, prompt_text: str, token_text: TokenText | None) -> tuple[str, dict[str, Any] | None]:
    """Text and log probabilities of a completion with its prompt in front; ``token_text`` if the latter were asked for."""
    text = prompt_text + output.text
    if token_text is None:
        return text, None
    prompt = output.prompt_logprobs or (None,) * len(output.prompt_token_ids)
    answer = output.logprobs or (None,) * len(output.token_ids)
    ids = (*output.prompt_token_ids, *output.token_ids)
    return text, completion_logprobs(ids, (*prompt, *answer), token_text)


def model_entry(
    id: str, *, root: str, created: int, max_model_len: int, fingerprint: str, reuse: str, techniques: Mapping[str, str]
) -> dict[str, Any]:
    """One entry of ``/v1/models``. ``root`` is where the tokenizer comes from; ``techniques`` are names with their gates."""
    listed = [{"name": name, "gate": gate} for name, gate in techniques.items()]
    return {
        "id": id,
        "object": "model",
        "created": created,
        "owned_by": "kvweave",
        "root": root,
        "max_model_len": max_model_len,
        "kvweave": {"fingerprint": fingerprint, "reuse": reuse, "techniques": listed},
    }


def model_list(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(entries)}
