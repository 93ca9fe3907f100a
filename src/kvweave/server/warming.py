"""Filling the caches ahead of requests, and telling what they would give one, from the body of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvweave.core.keys import Scope
from kvweave.core.prompt import TokenSpan
from kvweave.core.report import Output
from kvweave.core.sampling import SamplingParams
from kvweave.engine.admission import namespace
from kvweave.engine.sequence import slots_needed
from kvweave.errors import IntegrityError, InvalidRequest
from kvweave.index.chunks import ChunkIndex, Piece
from kvweave.protocol.chat import ChatRequest, parse_chat
from kvweave.reuse.registry import make_technique
from kvweave.server.accounts import record
from kvweave.server.prepare import Arrival, Job, Wanted, chat_job, check_model, owners_of
from kvweave.server.state import Answered, ServerState
from kvweave.store.base import Reach

What = Literal["prefix", "chunks"]
_WHAT: tuple[What, ...] = ("prefix", "chunks")
_FLUSH = 60.0  # seconds that slower tiers have to store what was computed


def warm(state: ServerState, arrival: Arrival, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Compute what ``body`` would need and keep it; what is there already costs nothing. Answers when it is stored.

    ``what``: the exact prefix of this conversation, or chunks of its documents for any conversation. Raises
    ``RequestError``s, and ``PinQuotaExceeded`` for strict pins.
    """
    what = _what(body.get("what", "prefix"))
    call = _call(state, {name: value for name, value in body.items() if name != "what"}, headers)
    job = _job(state, arrival, call, SamplingParams(max_tokens=0))
    exchange = replace(job.exchange, owners=owners_of(state, job.rendered))
    computed = _warm_chunks(state, job, "memory" if call.cache.store == "memory" else "all") if "chunks" in what else 0
    if "prefix" in what:
        output, answered = _run(state, job)
        computed += output.reuse.prefilled_tokens
        record(state, replace(exchange, pins=()), answered)
    documents = state.segments.note(exchange)
    state.segments.pin_marked(exchange, documents)
    return {
        "id": arrival.id,
        "object": "cache.warm",
        "what": list(what),
        "prompt_tokens": len(exchange.prompt.token_ids),
        "computed_tokens": computed,
        "stored": state.llm.flush(_FLUSH),
        "segments": [state.segments.tell(exchange, one) for one in documents],
    }


def estimate(state: ServerState, arrival: Arrival, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """What the caches have for ``body`` at this moment; nothing is computed, and nothing counts as used.

    ``reusable_tokens`` are of chunks out of their place, where the request may have them fused: some of them are computed
    again. Raises ``RequestError``s.
    """
    call = _call(state, body, headers)
    job = _job(state, arrival, call, call.sampling)
    engine, exchange = state.llm.engine, job.exchange
    n = len(exchange.prompt.token_ids)
    found = _look(state, job)
    fused = found.fused if job.request.technique.reuse == "fused" and found.fused >= engine.parts.min_reuse_tokens else 0
    return {
        "object": "cache.estimate",
        "asked": exchange.asked,
        "would_run": "fused" if fused else "off" if job.request.technique.reuse == "off" else "exact",
        "gate": exchange.gate,
        "prompt_tokens": n,
        "matched_tokens": found.exact + fused,
        "exact_tokens": found.exact,
        "reusable_tokens": fused,
        "prefilled_tokens": n - found.exact - fused,
        "repos_tokens": 0,
        "drop_skipped_tokens": 0,
        "restored_tokens": 0,
        "restore_cost": 0,
        "slots_needed": slots_needed(n, engine.check(job.request)),
        "segments": found.segments,
    }


def _what(value: Any) -> tuple[What, ...]:
    wanted = value if isinstance(value, list) else [value]
    if not wanted or any(one not in _WHAT for one in wanted):
        raise InvalidRequest('what: expected "prefix", "chunks" or a list of both.', param="what")
    return tuple(one for one in _WHAT if one in wanted)


def _call(state: ServerState, body: Mapping[str, Any], headers: Mapping[str, str]) -> ChatRequest:
    call = parse_chat(body, headers, state.limits, state.settings.strict_fields)
    check_model(state, call.model)
    return call


def _job(state: ServerState, arrival: Arrival, call: ChatRequest, sampling: SamplingParams) -> Job:
    wanted = Wanted(sampling, call.cache, samples=1, ignored=call.ignored, operations=call.operations)
    return chat_job(state, arrival, call.conversation, wanted)


def _warm_chunks(state: ServerState, job: Job, reach: Reach) -> int:
    """Returns the tokens computed."""
    exchange = job.exchange
    prompt = None if job.rendered is None else job.rendered.prompt
    documents = [] if prompt is None else [d for d in prompt.documents if d.kind == "document"]
    if not documents or not exchange.publish:
        return 0
    done = state.llm.precompute(
        documents, head=prompt, tenant=exchange.tenant, salt=exchange.salt, ttl=exchange.ttl, store=reach
    )
    return sum(one.computed_tokens for one in done)


def _run(state: ServerState, job: Job) -> tuple[Output, Answered]:
    """The exact prefill of a prompt."""
    request = replace(job.request, technique=make_technique("prefix"), asked="exact", fallback_reason=None)
    (sequence,) = state.loop.run([request])
    if sequence.output is None:
        raise IntegrityError("a prefill is done without an output")
    timings = sequence.output.reuse.timings
    times = {"first_token": timings["ttft_ms"] / 1e3, "total": timings["total_ms"] / 1e3}
    return sequence.output, Answered((sequence.output,), intervals=(), **times)


@dataclass
class _Found:
    """Tokens that could be reused. The last one of a prompt is always computed."""

    exact: int = 0
    fused: int = 0
    segments: list[dict[str, Any]] = field(default_factory=list)


def _look(state: ServerState, job: Job) -> _Found:
    exchange, index = job.exchange, state.llm.engine.parts.chunks
    found = _Found()
    if job.request.technique.reuse == "off":
        return found
    scope, ids = index.scope(exchange.tenant, exchange.salt), exchange.prompt.token_ids[:-1]
    prefix = found.exact = state.loop.call(lambda engine: engine.tree.covered(ids, namespace(scope)))
    at = 0
    for span in exchange.prompt.spans:
        stop = at + len(span.token_ids)
        if span.document is not None:
            inside = 0
            for piece in _pieces_held(index, span, job.request.anchors, scope):
                start, end = at + piece.start, min(at + piece.start + len(piece.token_ids), len(ids))
                size = max(0, end - max(start, prefix))
                exact = not found.fused and not index.lossy and ids[:start] == piece.anchor_ids
                found.exact, found.fused = found.exact + size * exact, found.fused + size * (not exact)
                inside += size
            place = {"segment": span.document.id, "span": [at, stop]}
            found.segments.append({**place, "prefix_tokens": max(0, min(prefix, stop) - at), "chunk_tokens": inside})
        at = stop
    return found


def _pieces_held(index: ChunkIndex, span: TokenSpan, anchors: Sequence[tuple[int, ...]], scope: Scope) -> list[Piece]:
    """Pieces of a document that some tier has, each behind the first anchor for which it does."""
    if span.document is None or span.document.kind != "document":
        return []
    choices = zip(*(index.pieces(span.token_ids, anchor, scope) for anchor in anchors), strict=True)
    held = (next((p for p in choice if index.store.contains(p.identity)), None) for choice in choices)
    return [piece for piece in held if piece is not None]
