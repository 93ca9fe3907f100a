"""What a tenant, or an operator, wants to know of a running server at a glance. No text of any prompt."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from kvweave.server.metrics import pool_usage
from kvweave.server.state import ServerState
from kvweave.store.tiered import TieredStore

_RECENT = 20


def tenant_stats(state: ServerState, tenant: str) -> dict[str, Any]:
    """Of one tenant: its requests in the log, its labels, and what its last requests got and missed."""
    return {
        "object": "cache.stats",
        "requests": state.requests.totals(tenant),
        "segments": state.segments.totals(tenant),
        "recent": [_brief(record) for record in state.requests.recent(tenant, _RECENT)],
    }


def server_stats(state: ServerState) -> dict[str, Any]:
    """Of all tenants together, since the start."""
    engine = state.llm.engine
    counters, store = engine.counters, engine.parts.chunks.store
    host = store.stats()
    tiers: dict[str, Any] = {"host": {"up": True, **asdict(host)}}
    if isinstance(store, TieredStore):
        up = state.tiers_up()
        for name, tier in store.tier_stats().items():
            hits, misses = tier.counters.hits, tier.counters.misses.total()
            tiers[name] = {"up": up[name], "hits": hits, "misses": misses, "queued_bytes": tier.queued_bytes}
    return {
        "model": state.model_name,
        "fingerprint": state.llm.built.fingerprint.short,
        "uptime_seconds": time.time() - state.started_at,
        "running": state.loop.running,
        "waiting": state.loop.waiting,
        "pool": {"slots": engine.allocator.num_slots, "used": pool_usage(engine), "prefix_tokens": engine.tree.num_tokens},
        "tokens": dict(counters.tokens),
        "generated_tokens": counters.generated_tokens,
        "precomputed_tokens": counters.precomputed_tokens,
        "requests": _listed(counters.requests, ("asked", "ran", "technique")),
        "fallbacks": _listed(counters.fallbacks, ("technique", "reason")),
        "tiers": tiers,
    }


def _listed(counts: dict[Any, int], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{**dict(zip(names, key, strict=True)), "count": count} for key, count in dict(counts).items()]


def _brief(record: dict[str, Any]) -> dict[str, Any]:
    cache = record["cache"]
    return {
        "id": record["id"],
        "created": record["created"],
        "prompt_tokens": record["prompt_tokens"],
        "tokens": record["tokens"],
        "asked": cache["asked"],
        "ran": cache["ran"],
        "fallback_reason": cache["fallback_reason"],
        "diverged": cache["prefix"]["diverged"],
        "missed": [s["segment"] for s in cache["segments"] if s["result"] == "miss"],
        "ttft_ms": record["timings"]["ttft_ms"],
    }
