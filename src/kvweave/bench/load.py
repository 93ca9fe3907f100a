"""Sends the sessions of a workload: so many at a time, or as they arrive by chance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from kvweave.bench.streaming import Exchange, exchange
from kvweave.bench.target import Message, Target
from kvweave.bench.workloads import Session


@dataclass(frozen=True)
class Sample:
    """One request of a run: which turn of which session, and what came of it."""

    session: int
    turn: int
    exchange: Exchange


class Sender:
    """Sends sessions turn by turn and keeps a :class:`Sample` of each request. A session ends at its first error.

    Args:
        clock: reads the server's CPU seconds; only meaningful with one session at a time.
        on_sample: called after each request.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        target: Target,
        clock: Callable[[], float] | None = None,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        self.samples: list[Sample] = []
        self._client, self._target, self._clock, self._on_sample = client, target, clock, on_sample

    async def send(self, number: int, session: Session) -> None:
        history: list[Message] = []
        for turn, words in enumerate(session):
            history.append(self._target.user_message(words))
            answer = await exchange(self._client, self._target.url, self._target.request(history), self._clock)
            self.samples.append(Sample(number, turn, answer))
            self._on_sample(self.samples[-1])
            if answer.error is not None:
                return
            history.append({"role": "assistant", "content": answer.text})

    async def closed_loop(self, sessions: Sequence[Session], concurrency: int) -> None:
        """``concurrency`` users, each of whom starts a session when the one before has ended."""
        numbered = iter(enumerate(sessions))

        async def user() -> None:
            for number, session in numbered:
                await self.send(number, session)

        async with asyncio.TaskGroup() as users:
            for _ in range(concurrency):
                users.create_task(user())

    async def open_loop(self, sessions: Sequence[Session], rate: float, chance: random.Random) -> None:
        """Sessions start as a Poisson process, ``rate`` a second, whether or not the server keeps up."""
        loop = asyncio.get_running_loop()
        arrival = loop.time()
        async with asyncio.TaskGroup() as users:
            for number, session in enumerate(sessions):
                await asyncio.sleep(max(0.0, arrival - loop.time()))
                users.create_task(self.send(number, session))
                arrival += chance.expovariate(rate)
