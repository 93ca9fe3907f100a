"""Erasing a tenant: what runs, what is cached in every tier, labels, and records of requests."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from typing import Any, Literal

from blake3 import blake3

from kvweave.engine.engine import Engine
from kvweave.engine.sequence import Sequence
from kvweave.errors import TenantBusy
from kvweave.server.state import ServerState

LOG = logging.getLogger("kvweave.server")
InFlight = Literal["refuse", "wait", "abort"]
_POLL = 0.05  # seconds


def erase_tenant(state: ServerState, tenant: str, in_flight: InFlight, caller: str) -> dict[str, Any]:
    """Erase all that a tenant left, and give it a new key; returns the receipt. Erasing again finds nothing, and is fine.

    ``in_flight``: what becomes of the tenant's running requests. Raises ``TenantBusy`` if there are any (``refuse``), or
    still are when a shutdown's patience is over (``wait``).
    """
    _settle(state, tenant, in_flight)
    receipt = state.llm.erase(tenant)
    body: dict[str, Any] = {
        "receipt_id": receipt.receipt_id,
        "tenant": tenant,
        "erased_at": receipt.erased_at,
        "tiers": {name: asdict(tier) for name, tier in receipt.tiers.items()},
        "index_entries": state.segments.erase(tenant),
        "request_records": state.requests.erase(tenant),
        "pending": list(receipt.pending),
    }
    LOG.info("tenant erased by %s: receipt %s", caller, receipt.receipt_id)
    return body | {"digest": digest_of(body)}


def digest_of(receipt: dict[str, Any]) -> str:
    """BLAKE3 over all fields of a receipt but this one, as JSON with sorted keys."""
    fields = {name: value for name, value in receipt.items() if name != "digest"}
    return blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _settle(state: ServerState, tenant: str, in_flight: InFlight) -> None:
    """No request of the tenant runs any more."""
    if in_flight == "abort":
        state.loop.call(lambda engine: _abort(engine, tenant))
        return
    until = time.monotonic() + (state.settings.drain_seconds if in_flight == "wait" else 0.0)
    while busy := state.loop.call(lambda engine: len(_running(engine, tenant))):
        if time.monotonic() >= until:
            raise TenantBusy(
                f"Tenant '{tenant[:100]}' has {busy} running requests. Wait, or erase with in_flight=abort.",
            )
        time.sleep(_POLL)


def _running(engine: Engine, tenant: str) -> list[Sequence]:
    return [s for s in (*engine.scheduler.running, *engine.scheduler.waiting) if s.tenant == tenant]


def _abort(engine: Engine, tenant: str) -> None:
    for sequence in _running(engine, tenant):
        engine.abort(sequence, "its tenant was erased")
