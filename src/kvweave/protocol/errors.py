"""Errors on the wire: status, body and headers of anything that can go wrong."""

from __future__ import annotations

import math
from typing import Any

from kvweave.errors import ConfigError, KvweaveError, UnknownTechnique

_MAX_RETRY = 60  # seconds
_RETRY = 1.0


def error_json(error: BaseException, request_id: str = "") -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers. What nobody foresaw is a 500 that says nothing but where to look."""
    status = error.http_status if isinstance(error, KvweaveError) else 500
    if isinstance(error, KvweaveError) and status != 500:
        body = error_body(str(error), error.error_type, wire_code(error), error.param)
    else:
        message = f"Unexpected error in request {request_id or '-'}. The server log has the trace under this id."
        body = error_body(message, "server_error", "internal_error")
    headers: dict[str, str] = {}
    if 400 <= status < 500 and status != 429:
        headers["x-should-retry"] = "false"  # OpenAI's clients repeat 409 by themselves
    if status in (429, 503):
        after = error.retry_after if isinstance(error, KvweaveError) else None
        headers["Retry-After"] = str(min(_MAX_RETRY, max(1, math.ceil(_RETRY if after is None else after))))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return status, body, headers


def wire_code(error: KvweaveError) -> str:
    """The stable machine name. An option's name or value in a request is a request's matter, whoever checked it."""
    if isinstance(error, ConfigError) and not isinstance(error, UnknownTechnique):
        return "invalid_request"
    return error.code


def error_body(message: str, error_type: str, code: str, param: str | None = None) -> dict[str, Any]:
    """``{"error": ...}``. Texts from outside may hold what UTF-8 can't; it is escaped."""
    safe = message.encode(errors="backslashreplace").decode()
    return {"error": {"message": safe, "type": error_type, "param": param, "code": code}}
