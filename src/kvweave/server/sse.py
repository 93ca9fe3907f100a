"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nginx would collect events


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """A response of events. ``close`` is called when it ends, however that is."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], headers: Mapping[str, str]) -> None:
        super().__init__(events, headers={**_HEADERS, **headers})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def with_comments(events: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    """The same events, and a comment whenever there was none for so many seconds."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait((waiting,), timeout=seconds))[0]:
                yield COMMENT
            try:
                yield waiting.result()
            except StopAsyncIteration:
                return
    finally:
        if waiting is not None:
            waiting.cancel()
