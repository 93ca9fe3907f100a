"""What a route declares about its caller, and how it reads the body."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from kvweave.errors import InvalidRequest
from kvweave.server.keys import Caller, Scope
from kvweave.server.state import ServerState


def server_of(request: Request) -> ServerState:
    """The server that got a request; a FastAPI dependency."""
    state: ServerState = request.app.state.server
    return state


def caller_with(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """A FastAPI dependency: the caller, who has ``scope``. Raises ``MissingApiKey``, ``InvalidApiKey``, ``ScopeMissing``."""

    async def caller(request: Request) -> Caller:
        found = server_of(request).keys.identify(request.headers.get("authorization"))
        found.require(scope)
        return found

    return caller


Infer = Annotated[Caller, Depends(caller_with("infer"))]
"""Parameter of a route that needs a caller who may run prompts."""


def parse_json(raw: bytes) -> dict[str, Any]:
    """A body as an object. Raises ``InvalidRequest``."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body isn't JSON: {str(error)[:100]}. Send an object.") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body isn't a JSON object. Send one with the fields of this request.")
    return body
