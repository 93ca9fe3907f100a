"""A real server on a free port of this machine, in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kvweave.server.app import create_app
from kvweave.server.compose import make_state
from kvweave.server.lifecycle import bind, url_of
from kvweave.server.settings import resolve
from kvweave.server.state import ServerState

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Live:
    state: ServerState
    url: str

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=60)

    def free_slots(self) -> int:
        return self.state.loop.call(lambda engine: engine.allocator.num_free + engine.tree.num_tokens)

    def check(self) -> None:
        """Everything that was reserved has an owner."""
        self.state.loop.call(lambda engine: engine.check_integrity())

    def idle(self) -> bool:
        return not self.state.loop.running and not self.state.loop.waiting


@contextmanager
def live_server(model: Path, home: Path, **settings: Any) -> Iterator[Live]:
    flags = {"model": str(model), "port": 0, "dtype": "float32", "threads": "1", "host_tier": "64MiB", "kv_pool": "16MiB"}
    resolved = resolve({"served_model_name": "tiny", **flags, **settings}, {})
    with bind(resolved.settings) as bound:
        state = make_state(resolved.settings, home=home)
        config = uvicorn.Config(create_app(state), log_config=None, lifespan="off", server_header=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Live(state, url_of(bound))
        finally:
            server.should_exit = True
            thread.join(30)
            state.llm.close()
            state.workers.shutdown()
            state.requests.close()


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
