"""From a checked body to what the engine takes. All of it may be slow, and runs on a worker thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kvweave.core.chat import Conversation
from kvweave.core.prompt import Prompt, TokenPrompt, TokenSpan
from kvweave.core.sampling import ConstraintFactory, SamplingParams
from kvweave.engine.sequence import Request
from kvweave.errors import InvalidRequest, TemplateRefused, UnknownModel
from kvweave.models.chat_template import Rendered
from kvweave.protocol.cache import CacheOptions
from kvweave.server.keys import Caller
from kvweave.server.mode import Mode, mode_of
from kvweave.server.state import Exchange, ServerState


@dataclass(frozen=True)
class Arrival:
    """An HTTP request whose body has been read. ``id``: of the object that will answer it."""

    id: str
    request_id: str
    endpoint: str
    caller: Caller
    start: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)
    """Unix time."""


@dataclass(frozen=True)
class Wanted:
    """What the prompts of one body have in common."""

    sampling: SamplingParams
    cache: CacheOptions
    samples: int
    ignored: tuple[str, ...]
    operations: int
    prompt_logprobs: int | None = None
    constraint: ConstraintFactory | None = None


@dataclass(frozen=True)
class Job:
    """One prompt, ready to run."""

    request: Request
    exchange: Exchange
    rendered: Rendered | None = None


def check_model(state: ServerState, name: str | None) -> None:
    """Raises ``UnknownModel``."""
    if name is not None and name != state.model_name:
        raise UnknownModel(f"Model '{name[:100]}' isn't served here. Use '{state.model_name}'.", param="model")


def chat_job(state: ServerState, arrival: Arrival, conversation: Conversation, wanted: Wanted) -> Job:
    """Raises ``RequestError``s."""
    rendered = state.llm.tokenizer.render(conversation)
    mode = mode_of(state, wanted.cache)
    if rendered.opaque and mode.fuses:
        mode = mode.fall_back("template_opaque")
    tokens = state.llm.tokenizer.tokenise(rendered.prompt)
    return _job(state, arrival, tokens, mode, wanted, conversation=conversation, rendered=rendered)


def completion_job(state: ServerState, arrival: Arrival, prompt: str | tuple[int, ...] | Prompt, wanted: Wanted) -> Job:
    """Raises ``RequestError``s."""
    return _job(state, arrival, tokens_of(state, prompt), mode_of(state, wanted.cache), wanted)


def tokens_of(state: ServerState, prompt: str | tuple[int, ...] | Prompt) -> TokenPrompt:
    """Raises ``InvalidRequest`` for ids that the model doesn't have."""
    if not isinstance(prompt, tuple):
        return state.llm.tokenizer.tokenise(prompt if isinstance(prompt, Prompt) else Prompt(prompt))
    size = state.llm.engine.parts.adapter.vocab_size
    if (largest := max(prompt)) >= size:
        raise InvalidRequest(f"prompt: this model has {size:,} tokens, got id {largest}. Use ids below.", param="prompt")
    return TokenPrompt((TokenSpan(prompt),))


def _job(
    state: ServerState,
    arrival: Arrival,
    tokens: TokenPrompt,
    mode: Mode,
    wanted: Wanted,
    *,
    conversation: Conversation | None = None,
    rendered: Rendered | None = None,
) -> Job:
    cache = wanted.cache
    publish = cache.store != "none"
    # Log probabilities of a prompt need all its logits: nothing is read from a cache unless the request says so.
    reads = wanted.prompt_logprobs is None or cache.reuse is not None or cache.technique is not None
    options: dict[str, Any] = {"technique": mode.technique} if reads else {}
    request = state.llm.request(
        tokens,
        wanted.sampling,
        tenant=arrival.caller.tenant,
        salt=cache.salt,
        samples=wanted.samples,
        prompt_logprobs=wanted.prompt_logprobs,
        publish=publish,
        ttl=cache.ttl,
        constraint=wanted.constraint,
        **options,
    )
    exchange = Exchange(
        id=arrival.id,
        request_id=arrival.request_id,
        endpoint=arrival.endpoint,
        tenant=arrival.caller.tenant,
        salt=cache.salt,
        prompt=tokens,
        asked=mode.asked,
        gate=mode.gate,
        conversation=conversation,
        ignored=wanted.ignored,
        operations=wanted.operations,
        publish=publish,
        ttl=cache.ttl,
        pins=cache.pins,
        arrived=arrival.created,
    )
    state.segments.check_pins(exchange)
    return Job(mode.applied(request) if reads else request, exchange, rendered)


def owners_of(state: ServerState, rendered: Rendered | None) -> list[int] | None:
    """Message of each prompt token; None where there are no messages, or they can't be told apart."""
    if rendered is None or rendered.owners is None:
        return None
    try:
        return state.llm.tokenizer.owners(rendered)
    except TemplateRefused:
        return None
