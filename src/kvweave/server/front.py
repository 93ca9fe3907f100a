"""What every request passes first: an id, who may talk to this server at all, the size and type of bodies, one log line."""

from __future__ import annotations

import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.errors import AccessError, KvweaveError, RequestTooLarge, UnsupportedMediaType
from kvweave.server.failures import failure
from kvweave.server.state import ServerState

LOG = logging.getLogger("kvweave.server")
_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_FREQUENT = ("/health", "/health/ready", "/metrics")
"""Polled by machines: their lines are for debugging."""
_GONE = 499  # nginx's status for a client that didn't wait


@dataclass
class Note:
    """What the log says about a request. Never text of prompts, keys or salts."""

    request_id: str
    fields: dict[str, Any] = field(default_factory=dict)
    status: int = 0


def note_of(request: Request) -> Note:
    """The note of the request a route answers."""
    note: Note = request.scope["state"]["note"]
    return note


class Front:
    """ASGI middleware. Whatever goes wrong behind it becomes an error in our shape, or ends a stream that has begun."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._body_bytes = state.settings.body_bytes
        self._local_only = state.settings.loopback and state.keys.open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        note = Note(given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}")
        scope.setdefault("state", {})["note"] = note
        answer = _Answer(note, send)
        try:
            self._check(scope, headers)
            await self._app(scope, self._limited(receive), answer.send)
        except ClientDisconnect:
            note.status = _GONE
        except Exception as error:
            await self._fail(error, answer, scope, receive)
        finally:
            _log(scope, note, time.perf_counter() - start)

    async def _fail(self, error: Exception, answer: _Answer, scope: Scope, receive: Receive) -> None:
        if not isinstance(error, KvweaveError):
            LOG.exception("unexpected error in request %s", answer.note.request_id)
        if not answer.note.status:
            await failure(self._state, error, answer.note.request_id)(scope, receive, answer.send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Without keys no web page may use the server: pages of other names have another Host, and forms another type."""
        name = re.sub(r":\d+$", "", headers.get("host", "").lower())
        if self._local_only and name not in _LOCAL:
            raise AccessError(
                "Without an API key this server answers to localhost alone. Use http://127.0.0.1, or start it with a key."
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] in ("POST", "PUT", "PATCH") and kind != "application/json":
            raise UnsupportedMediaType("Send Content-Type: application/json.")
        announced = headers.get("content-length", "")
        self._check_size(int(announced) if announced.isascii() and announced.isdecimal() else 0)

    def _check_size(self, size: int) -> None:
        if size > self._body_bytes:
            raise RequestTooLarge(
                f"The body has {_size(size)} or more, the limit is {_size(self._body_bytes)}. "
                "Send less, or raise --max-body."
            )

    def _limited(self, receive: Receive) -> Receive:
        """``receive`` that stops at the limit, whatever the headers promised."""
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            self._check_size(read)
            return message

        return limited


@dataclass
class _Answer:
    """Sends, and remembers the status."""

    note: Note
    _send: Send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.note.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.note.request_id
        await self._send(message)


def _log(scope: Scope, note: Note, seconds: float) -> None:
    fields = {
        "request_id": note.request_id,
        "method": scope["method"],
        "path": scope["path"] if scope.get("route") else "-",
        "status": note.status or _GONE,
        **note.fields,
        "ms": round(seconds * 1e3, 1),
    }
    level = logging.DEBUG if scope["path"] in _FREQUENT else logging.INFO
    LOG.log(level, "%s", " ".join(f"{k}={v}" for k, v in fields.items()), extra={"fields": fields})


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count:,} bytes"
