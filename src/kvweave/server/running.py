"""From the engine's thread to an event loop: pieces of answers, as they are made."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from kvweave.core.report import Delta, Output
from kvweave.engine.loop import EngineLoop
from kvweave.engine.sequence import Request as EngineRequest
from kvweave.engine.sequence import Sequence as Running
from kvweave.errors import RequestAborted
from kvweave.server.state import Answered

T = TypeVar("T")
_POLL = 1.0  # seconds after which it is asked whether the engine still lives


class Answers:
    """The answers to the prompts of one HTTP request. To be made where an event loop runs, and closed in any case.

    ``start`` is the time of the request's last byte (``time.perf_counter``).
    """

    def __init__(self, engine: EngineLoop, start: float) -> None:
        self._engine = engine
        self._event_loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue()
        self._start = start
        self._lock = threading.Lock()
        self._closed = False
        self._clocks: list[_Clock] = []
        self.sequences: list[Running] = []

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue the prompts, all or none; on any thread. Raises as ``EngineLoop.submit`` does."""
        self._clocks = [_Clock(self._start) for _ in requests]
        sequences = self._engine.submit_all(requests, [partial(self._hear, i) for i in range(len(requests))])
        with self._lock:
            self.sequences = sequences
            if self._closed:  # the client went away meanwhile
                self._cancel()

    def close(self) -> None:
        """Stop what isn't finished, before the engine's next step."""
        with self._lock:
            self._closed = True
            self._cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, Delta]]:
        """Number of the prompt and piece, until all samples of all prompts are there. Raises what ended one of them."""
        left = sum(sequence.request.samples for sequence in self.sequences)
        while left:
            prompt, piece = await self._next()
            if isinstance(piece, Exception):
                raise piece
            self._clocks[prompt].note(piece)
            left -= piece.output is not None
            yield prompt, piece

    def answered(self) -> list[Answered]:
        """One for each prompt, when all pieces were read."""
        return [clock.answered() for clock in self._clocks]

    def _hear(self, prompt: int, piece: Delta | Exception) -> None:
        with suppress(RuntimeError):  # the server is gone
            self._event_loop.call_soon_threadsafe(self._arrived.put_nowait, (prompt, piece))

    async def _next(self) -> tuple[int, Delta | Exception]:
        while True:
            try:
                async with asyncio.timeout(_POLL):
                    return await self._arrived.get()
            except TimeoutError:
                if not self._engine.alive:
                    raise RequestAborted("The engine's thread has ended. Restart the server.") from None

    def _cancel(self) -> None:
        for sequence in self.sequences:
            self._engine.cancel(sequence, "its client went away")


class _Clock:
    """When the pieces of one prompt's answers came."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._intervals: list[float] = []
        self._outputs: dict[int, Output] = {}

    def note(self, piece: Delta) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = now
        if piece.index in self._last:
            self._intervals.append(now - self._last[piece.index])
        self._last[piece.index] = now
        if piece.output is not None:
            self._outputs[piece.index] = piece.output

    def answered(self) -> Answered:
        first = self._start if self._first is None else self._first
        return Answered(
            outputs=tuple(self._outputs[i] for i in sorted(self._outputs)),
            first_token=first - self._start,
            intervals=tuple(self._intervals),
            total=max(self._last.values(), default=first) - self._start,
        )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns. If the client goes away first it is cancelled, and ``ClientDisconnect`` raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
