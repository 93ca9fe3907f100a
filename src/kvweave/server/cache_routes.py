"""``/v1/cache``: warm, list, pin, erase and explain what is cached."""

from __future__ import annotations

import asyncio
import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.requests import Request

from kvweave.protocol.cache_bodies import Closed, Duration
from kvweave.protocol.validation import validate
from kvweave.server.access import Infer, caller_with, parse_json, server_of
from kvweave.server.describe import answers, takes
from kvweave.server.erasing import InFlight, erase_tenant
from kvweave.server.explain import compare
from kvweave.server.front import note_of
from kvweave.server.keys import Caller
from kvweave.server.prepare import Arrival
from kvweave.server.respond import on_worker
from kvweave.server.state import ServerState
from kvweave.server.statistics import server_stats, tenant_stats
from kvweave.server.warming import estimate, warm

Cache = Annotated[Caller, Depends(caller_with("cache"))]
Admin = Annotated[Caller, Depends(caller_with("admin"))]
Salt = Annotated[str, Query(alias="cache_salt", max_length=128)]
Label = Annotated[str, Query(max_length=128)]

router = APIRouter(prefix="/v1/cache")


class PinBody(Closed):
    """How long a segment is to stay cached, from each of its uses on."""

    pin: Duration = Field(ge=1, le=30 * 86400)


_WHAT = {"enum": ["prefix", "chunks"]}
_WARM_BODY = {
    "allOf": [{"$ref": "#/components/schemas/ChatCompletionBody"}],
    "properties": {"what": {"anyOf": [_WHAT, {"type": "array", "items": _WHAT, "minItems": 1}], "default": "prefix"}},
}
_WARM = {"requestBody": {"required": True, "content": {"application/json": {"schema": _WARM_BODY}}}}
_PIN = {"requestBody": {"required": True, "content": {"application/json": {"schema": PinBody.model_json_schema()}}}}


@router.post("/warm", openapi_extra=_WARM, responses=answers("cache.warm"))
async def warm_cache(request: Request, caller: Infer) -> dict[str, Any]:
    """Compute and keep what a chat request would need: a chat body, and ``what``: prefix, chunks, or a list of both."""
    state, raw = server_of(request), await request.body()
    arrival = _arrival(request, caller, "warm")
    with state.keys.running(caller):
        work = lambda: warm(state, arrival, parse_json(raw), dict(request.headers))  # noqa: E731
        return await asyncio.to_thread(work)  # it may take minutes, and the workers have others to serve


@router.post("/estimate", openapi_extra=takes("ChatCompletionBody"), responses=answers("cache.estimate"))
async def estimate_request(request: Request, caller: Infer) -> dict[str, Any]:
    """What the caches have for a chat body now. Nothing is computed."""
    state, raw = server_of(request), await request.body()
    arrival = _arrival(request, caller, "estimate")
    return await on_worker(state, lambda: estimate(state, arrival, parse_json(raw), dict(request.headers)))


@router.get("/segments", responses=answers("list"))
async def list_segments(
    request: Request,
    caller: Cache,
    prefix: Label = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Label = "",
    salt: Salt = "",
) -> dict[str, Any]:
    """Segments with a label, in order of labels: those that begin with ``prefix`` and come behind ``after``."""
    state = server_of(request)
    data, more = await on_worker(state, state.segments.page, caller.tenant, salt, prefix, limit, after)
    return {"object": "list", "data": data, "has_more": more}


@router.get("/segments/{id}", responses=answers("cache.segment"))
async def get_segment(request: Request, caller: Cache, id: str, salt: Salt = "") -> dict[str, Any]:
    """What is cached under a label, and where."""
    state = server_of(request)
    return await on_worker(state, state.segments.describe, caller.tenant, salt, id)


@router.delete("/segments/{id}", responses=answers("cache.segment.deleted"))
async def delete_segment(request: Request, caller: Cache, id: str, salt: Salt = "") -> dict[str, Any]:
    """Forget a label, and remove its chunks from every tier."""
    state = server_of(request)
    records = await on_worker(state, state.segments.remove, caller.tenant, salt, id)
    return {"id": id, "object": "cache.segment.deleted", "deleted": True, "records": records}


@router.post("/segments/{id}/pin", openapi_extra=_PIN, responses=answers("cache.segment"))
async def pin_segment(request: Request, caller: Cache, id: str, salt: Salt = "") -> dict[str, Any]:
    """Keep what is cached under a label at least so long, from each use on."""
    state, raw = server_of(request), await request.body()

    def pin() -> dict[str, Any]:
        state.segments.pin(caller.tenant, salt, id, validate(PinBody, parse_json(raw)).pin)
        return state.segments.describe(caller.tenant, salt, id)

    return await on_worker(state, pin)


@router.delete("/segments/{id}/pin", responses=answers("cache.segment"))
async def unpin_segment(request: Request, caller: Cache, id: str, salt: Salt = "") -> dict[str, Any]:
    """It may be evicted again."""
    state = server_of(request)

    def unpin() -> dict[str, Any]:
        state.segments.unpin(caller.tenant, salt, id)
        return state.segments.describe(caller.tenant, salt, id)

    return await on_worker(state, unpin)


@router.delete("/tenants/{tenant}", responses=answers())
async def delete_tenant(request: Request, caller: Admin, tenant: str, in_flight: InFlight = "refuse") -> dict[str, Any]:
    """Erase all that a tenant left in every tier, index and log, and give it a new key. The answer is a receipt."""
    return await asyncio.to_thread(erase_tenant, server_of(request), tenant, in_flight, caller.name)


@router.get("/stats", responses=answers("cache.stats"))
async def stats(request: Request, caller: Cache) -> dict[str, Any]:
    """Numbers of the caller's tenant; with scope admin those of the whole server as well."""
    state = server_of(request)

    def look() -> dict[str, Any]:
        return tenant_stats(state, caller.tenant) | ({"server": server_stats(state)} if "admin" in caller.scopes else {})

    return await on_worker(state, look)


@router.get("/requests/{id}", responses=answers())
async def explain_request(
    request: Request, caller: Infer, id: str, other: Annotated[str | None, Query(alias="compare")] = None
) -> dict[str, Any]:
    """Why a request got what it got, by object id or request id. With ``compare``: where its prompt leaves another's."""
    state = server_of(request)
    return await on_worker(state, _explain, state, caller.tenant, id, other)


def _explain(state: ServerState, tenant: str, id: str, other: str | None) -> dict[str, Any]:
    record = state.requests.get(tenant, id)
    if other is None:
        return record
    difference = compare(state.requests.shape(tenant, id), state.requests.shape(tenant, other))
    return {
        "object": "cache.comparison",
        "request": record,
        "compared_with": state.requests.get(tenant, other),
        "diverged": difference,
    }


def _arrival(request: Request, caller: Caller, kind: str) -> Arrival:
    return Arrival(f"{kind}-{secrets.token_hex(12)}", note_of(request).request_id, request.url.path, caller)
