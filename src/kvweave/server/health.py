"""Open to all: is it alive, is it ready, which version, which models, and the metrics."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvweave import __version__
from kvweave.errors import Draining, KvweaveError, Unavailable
from kvweave.protocol.responses import model_entry, model_list
from kvweave.reuse.gate import Gates
from kvweave.reuse.registry import make_technique, technique_names
from kvweave.server.access import caller_with, server_of
from kvweave.server.describe import answers
from kvweave.server.respond import on_worker
from kvweave.server.state import ServerState

router = APIRouter()
_RETRY = 5.0  # seconds


@router.get("/health", responses=answers())
async def health(request: Request) -> Response:
    """The process answers and the engine's thread lives."""
    if not server_of(request).loop.alive:
        raise Unavailable("The engine's thread has ended. Restart the server.", retry_after=_RETRY)
    return JSONResponse({"status": "ok"})


@router.get("/health/ready", responses=answers())
async def ready(request: Request) -> Response:
    """It takes requests: alive, not shutting down, and all tiers can be reached."""
    state = server_of(request)
    await health(request)
    if state.loop.draining:
        raise Draining("The server is shutting down. Send requests to another one.", retry_after=_RETRY)
    down = [tier for tier, up in state.tiers_up().items() if not up]
    if down:
        raise Unavailable(f"Tiers that can't be reached: {', '.join(down)}. Check them.", retry_after=_RETRY)
    return JSONResponse({"status": "ready"})


@router.get("/version", responses=answers())
async def version() -> Response:
    return JSONResponse({"version": __version__})


@router.get("/metrics", responses={200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    state = server_of(request)
    text = await on_worker(state, state.metrics.exposition)  # it may wait for tiers
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", responses=answers("list"), dependencies=[Depends(caller_with("infer"))])
async def models(request: Request) -> Response:
    """The model that is served, and which techniques it may be used with."""
    state = server_of(request)
    return JSONResponse(model_list([await on_worker(state, _entry, state)]))


def _entry(state: ServerState) -> dict[str, Any]:
    return model_entry(
        state.model_name,
        root=state.settings.model,
        created=int(state.started_at),
        max_model_len=state.llm.engine.parts.context_length,
        fingerprint=state.llm.built.fingerprint.short,
        reuse=state.settings.reuse,
        techniques=gate_states(state.gates),
    )


def gate_states(gates: Gates) -> dict[str, str]:
    """State of the gate of each technique that fuses, with its default options; plugins that don't load have none."""
    found: dict[str, str] = {}
    for name in technique_names():
        with suppress(KvweaveError):
            technique = make_technique(name)
            if technique.reuse == "fused":
                found[name] = gates.of(technique).state
    return found
