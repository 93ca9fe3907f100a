"""A server that streams made-up answers, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse


class Fake:
    """Notes what it was asked; ``fail`` makes every n-th request fail."""

    def __init__(self, *, kvweave: bool = False, fail: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.app = FastAPI()
        model: dict[str, Any] = {"id": "fake", "object": "model"} | ({"kvweave": {}} if kvweave else {})
        self.app.get("/v1/models")(lambda: {"data": [model]})

        @self.app.post("/v1/chat/completions")
        async def answer(request: Request) -> Any:
            body = await request.json()
            self.bodies.append(body)
            if fail and len(self.bodies) % fail == 0:
                return JSONResponse({"error": {"code": "overloaded"}}, 503)
            return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(0.002)
                yield f"data: {json.dumps({'choices': [{'delta': {'content': 'x'}}]})}\n\n"
            details = {"cached_tokens": 3, "fused_tokens": 4}
            usage = {"prompt_tokens": 10, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
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
