"""A server from its port to its last answer: bind, load, serve, drain, close."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from kvweave.errors import ConfigError
from kvweave.server.app import create_app
from kvweave.server.keys import read_keys
from kvweave.server.settings import ServerSettings
from kvweave.server.state import ServerState

LOG = logging.getLogger("kvweave.server")
_BACKLOG = 2048
_LAST_BYTES = 10.0  # seconds that clients have to take their last events


def bind(settings: ServerSettings) -> socket.socket:
    """The socket, before a model is loaded: a port that is taken shows at once. Raises ``ConfigError``."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"{settings.host}:{settings.port} can't be used: {error.strerror or error}. Choose another --port or --host."
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(state: ServerState, bound: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain and close. ``started`` is called once requests are taken."""
    config = uvicorn.Config(
        create_app(state),
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        lifespan="off",
        timeout_graceful_shutdown=int(_LAST_BYTES),
    )
    try:
        asyncio.run(_serve(state, _Server(config), bound, started))
    finally:
        state.llm.close()
        state.workers.shutdown(cancel_futures=True)
        state.requests.close()


class _Server(uvicorn.Server):
    """uvicorn would close its sockets at the first signal; ours goes on telling callers that it is shutting down."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(state: ServerState, server: _Server, bound: socket.socket, started: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_stop() -> None:
        if stop.is_set():
            LOG.warning("stopping at once")
            server.should_exit = server.force_exit = True
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop)
    loop.add_signal_handler(signal.SIGHUP, reread_keys, state)
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    started()
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
    await drain(state)
    server.should_exit = True
    await serving


async def drain(state: ServerState) -> None:
    """Refuse what is new, finish what runs, as long as the settings allow; then stop it, and write what is queued."""
    loop = asyncio.get_running_loop()
    seconds = state.settings.drain_seconds
    LOG.info("draining: %d running, %d waiting, at most %g s", state.loop.running, state.loop.waiting, seconds)
    if not await loop.run_in_executor(None, state.loop.drain, seconds):
        LOG.warning("requests that hadn't finished after %g s are stopped", seconds)
    await loop.run_in_executor(None, state.llm.close)


def reread_keys(state: ServerState) -> None:
    """Take the keys of the key file; the old ones stay if it can't be used."""
    if state.settings.api_key_file is None:
        return
    try:
        state.keys.replace(read_keys(state.settings.api_key_file))
    except ConfigError as error:
        LOG.error("the old keys stay in force: %s", error)
    else:
        LOG.info("keys read again")
