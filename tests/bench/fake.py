"""An OpenAI-compatible server that streams made-up answers, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

DETAILS = {"cached_tokens": 3, "fused_tokens": 4}
PROMPT_TOKENS = 10


@dataclass
class Fake:
    """Notes what it was asked. ``fail``: every n-th request; ``refuses``: a body field it doesn't know; ``breaks``: what the
    stream holds instead of its second token."""

    kvweave: bool = False
    fail: int = 0
    refuses: str = ""
    breaks: str = ""
    key: str = ""
    pause_s: float = 0.002
    details: Mapping[str, int] = field(default_factory=lambda: DETAILS)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    warmed: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    @property
    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self.models)
        app.post("/v1/chat/completions")(self.answer)
        if self.kvweave:
            app.post("/v1/cache/warm")(self.warm)
        return app

    async def models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "No."}}, 401)
        known: dict[str, Any] = {"id": "fake", "object": "model"} | ({"kvweave": {}} if self.kvweave else {})
        return JSONResponse({"data": [known, {"id": "other"}]})

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.refuses in body:
            return JSONResponse({"error": {"message": f"Unknown field {self.refuses}.", "code": "unknown"}}, 400)
        if self.fail and len(self.bodies) % self.fail == 0:
            return JSONResponse({"error": {"message": "Busy.", "code": "overloaded"}}, 503)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def warm(self, request: Request) -> Response:
        self.warmed.append(await request.json())
        return JSONResponse({"stored": True})

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """A role, a chunk a token, a finish reason, usage: each chunk of its own, as llama.cpp does it."""
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield _event(choices=[{"delta": {"role": "assistant", "content": None}}])
            for token in range(body["max_tokens"]):
                await asyncio.sleep(self.pause_s)
                if self.breaks and token == 1:
                    yield f"data: {self.breaks}\n\n"
                    return
                yield _event(choices=[{"delta": {"content": f"w{token} "}}])
            yield _event(choices=[{"delta": {}, "finish_reason": "length"}])
            tokens = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": body["max_tokens"]}
            yield _event(choices=[], usage={**tokens, "prompt_tokens_details": {**self.details, "none": None}})
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The base URL of an app that runs on a thread."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"
