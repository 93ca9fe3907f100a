"""What is told, kept and counted of a request that was answered."""

from __future__ import annotations

import time
from typing import Any

from kvweave.server.explain import Circumstances, explain, published_tokens, token_kinds
from kvweave.server.request_log import Logged
from kvweave.server.shape import RequestShape
from kvweave.server.state import Answered, Exchange, ServerState


def record(state: ServerState, exchange: Exchange, answered: Answered) -> dict[str, Any]:
    """Tell metrics, segments and the request log; returns what an answer's ``cache`` field says.

    It hashes the prompt and writes to the log: milliseconds, in which an event loop shouldn't stand still.
    """
    report = answered.outputs[0].reuse
    key = state.requests.key(exchange.tenant)
    shape = RequestShape.of(
        exchange.prompt,
        key=key,
        fingerprint=state.llm.built.fingerprint,
        salt=exchange.salt,
        template=state.llm.tokenizer.chat_template or "",
        conversation=exchange.conversation,
        owners=exchange.owners,
    )
    earlier = state.requests.best_match(exchange.tenant, shape, exchange.arrived)
    around = Circumstances(exchange.arrived, exchange.gate, exchange.ignored, exchange.warnings)
    explained = explain(report, shape, earlier, around)
    finished = time.time()
    written = exchange.publish and report.fused_tokens + report.recomputed_tokens == 0
    answer = max(0, len(answered.outputs[0].token_ids) - 1)  # the last token sampled has no KV
    state.requests.add(
        exchange.tenant,
        Logged(
            id=exchange.id,
            request_id=exchange.request_id,
            shape=shape.answered(key, [output.text for output in answered.outputs]),
            finished=finished,
            published=published_tokens(report, publish=exchange.publish),
            written=shape.num_tokens + (answer if written else 0),
            record=_record(exchange, answered, explained),
            expires=None if exchange.ttl is None else finished + exchange.ttl,
        ),
    )
    state.segments.finished(exchange, answered)
    state.metrics.finished(exchange, answered)
    return explained


def _record(exchange: Exchange, answered: Answered, explained: dict[str, Any]) -> dict[str, Any]:
    report = answered.outputs[0].reuse
    return {
        "id": exchange.id,
        "object": "cache.request",
        "request_id": exchange.request_id,
        "endpoint": exchange.endpoint,
        "created": int(exchange.arrived),
        "finish_reasons": [output.finish_reason for output in answered.outputs],
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": sum(len(output.token_ids) for output in answered.outputs),
        "tokens": token_kinds(report),
        "cache_ops": exchange.operations,
        "cache": explained,
        "timings": report.timings,
    }
