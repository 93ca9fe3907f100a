"""Completion requests: from a body to prompts, sampling parameters and cache options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvweave.core.prompt import Prompt
from kvweave.core.sampling import SamplingParams
from kvweave.errors import ConflictingFields, InvalidRequest, UnsupportedParameter
from kvweave.protocol.bodies import CompletionBody
from kvweave.protocol.cache import CacheOptions, Received, cache_options, receive
from kvweave.protocol.ignored import ignored_fields
from kvweave.protocol.limits import Limits
from kvweave.protocol.sampling import samples, sampling_params, stream_usage
from kvweave.protocol.segments import Segments
from kvweave.protocol.validation import validate

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


@dataclass(frozen=True)
class CompletionRequest:
    """A checked completion request. A prompt is a text, token ids, or a ``Prompt`` of segments.

    With ``echo`` the prompt is part of the answer; then ``sampling.logprobs`` is asked for the prompt's tokens, too. The
    answer to sample i of prompt p has index ``p * samples + i``.
    """

    model: str | None
    prompts: tuple[str | tuple[int, ...] | Prompt, ...]
    sampling: SamplingParams
    echo: bool = False
    samples: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cache: CacheOptions = field(default_factory=CacheOptions)
    ignored: tuple[str, ...] = ()
    operations: int = 0


def parse_completion(
    body: Mapping[str, Any], headers: Mapping[str, str], limits: Limits | None = None, strict: bool = False
) -> CompletionRequest:
    """Check the body of a completion request, any JSON value. Raises ``RequestError``s with ``param``.

    ``strict``: unknown fields are errors, too. Defaults are those of OpenAI's interface: 16 tokens, temperature 1.0.
    """
    limits = limits or Limits()
    checked = validate(CompletionBody, body)
    received = receive(checked, body, headers, limits)
    _refuse_edits(received)
    segments = Segments(limits)
    prompts = _prompts(checked, segments, limits)
    ignored = ignored_fields(checked, (("segments[].", one) for one in checked.segments or ()), strict)
    include_usage, continuous_usage = stream_usage(checked)
    max_tokens = DEFAULT_MAX_TOKENS if checked.max_tokens is None else checked.max_tokens
    return CompletionRequest(
        model=checked.model,
        prompts=prompts,
        sampling=sampling_params(checked, max_tokens=max_tokens, logprobs=checked.logprobs),
        echo=bool(checked.echo),
        samples=samples(checked, limits),
        stream=bool(checked.stream),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        cache=cache_options(received, tuple(segments.pins), 0, limits),
        ignored=ignored,
        operations=received.operations,
    )


def _refuse_edits(received: Received) -> None:
    body, cache, path = received.body, received.cache, received.path
    places = {
        f"{path}.drop": cache.drop,
        f"{path}.reposition": cache.reposition,
        "drop_message": body.drop_message,
        "drop_rule": body.drop_rule,
        "reposition": body.reposition,
        "context_management": body.context_management,
    }
    for name, value in places.items():
        if value not in (None, {}, []):
            raise UnsupportedParameter(
                f"{name}: a completion has no messages to drop or move. Use /v1/chat/completions.", param=name
            )


def _prompts(body: CompletionBody, segments: Segments, limits: Limits) -> tuple[str | tuple[int, ...] | Prompt, ...]:
    if body.segments is not None:
        if body.prompt is not None:
            raise ConflictingFields("prompt and segments are two spellings of one thing. Send only one.", param="segments")
        return (_prompt_of_segments(body, segments, limits),)
    if body.prompt is None:
        raise InvalidRequest("prompt is missing. Add it, or segments.", param="prompt")
    several = isinstance(body.prompt, list) and bool(body.prompt) and not isinstance(body.prompt[0], int)
    prompts = body.prompt if several and isinstance(body.prompt, list) else [body.prompt]
    if len(prompts) > limits.parts:
        raise InvalidRequest(
            f"prompt: {len(prompts):,} prompts, the limit is {limits.parts:,}. Send several requests.", param="prompt"
        )
    if not all(prompts):
        raise InvalidRequest("prompt: a prompt is empty. Send at least one character or token id.", param="prompt")
    return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)  # type: ignore[arg-type]


def _prompt_of_segments(body: CompletionBody, segments: Segments, limits: Limits) -> Prompt:
    items = body.segments or []
    if len(items) > limits.parts:
        raise InvalidRequest(
            f"segments: {len(items):,}, the limit is {limits.parts:,}. Join texts without marks.", param="segments"
        )
    if not any(item.text for item in items):
        raise InvalidRequest("segments: there is no text. Send at least one character.", param="segments")
    return Prompt(
        [
            item.text if item.cache is None else segments.marked(item.text, item.cache, f"segments[{i}]")
            for i, item in enumerate(items)
        ]
    )
