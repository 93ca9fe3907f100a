"""Errors as responses, all in one shape; validation is 400."""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvweave.errors import InvalidRequest, KvweaveError, NotFound
from kvweave.protocol.errors import error_json
from kvweave.server.state import ServerState

_RESPONSES = (
    "/v1/responses isn't served. In the OpenAI Agents SDK call set_default_openai_api('chat_completions'); "
    "elsewhere use POST /v1/chat/completions."
)


def failure(state: ServerState, error: BaseException, request_id: str) -> Response:
    """The response to a request that failed before its answer began; it is counted."""
    status, body, headers = error_json(error, request_id)
    state.metrics.failed(body["error"]["code"])
    return JSONResponse(body, status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Handler for our own errors."""
    return failure(request.app.state.server, error, request.scope["state"]["note"].request_id)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler for what routing refuses: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    response = await on_error(request, _as_ours(request, error))
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


def _as_ours(request: Request, error: HTTPException) -> KvweaveError:
    if error.status_code == 404:
        if request.url.path.startswith("/v1/responses"):
            return NotFound(_RESPONSES)
        return NotFound("There is no such endpoint. GET /openapi.json lists them.")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return InvalidRequest(f"This endpoint doesn't take {request.method}. Use {allowed}.")
    return InvalidRequest(str(error.detail))


async def on_bad_parameter(request: Request, error: Exception) -> Response:
    """Handler for path and query parameters that FastAPI checked."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return await on_error(request, InvalidRequest(f"{name}: {first['msg']}. Correct it.", param=name))
