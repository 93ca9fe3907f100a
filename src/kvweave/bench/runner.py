"""Sends calls: so many at a time, or at a rate; a call that continues another waits for its answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvweave.bench.client import Row, Target, measure, open_client
from kvweave.bench.server_cpu import ServerCpu
from kvweave.bench.workloads import Call

_WARM_UP = 2  # requests that aren't counted


@dataclass(frozen=True)
class Load:
    """Closed loop of ``concurrency``, or open loop of ``rate`` requests a second (Poisson)."""

    concurrency: int = 1
    rate: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """What was seen."""

    rows: tuple[Row, ...]
    seconds: float
    server_cpu: float | None
    """CPU seconds of the server and its children over the run; None if it isn't on this machine."""


async def run(
    target: Target,
    calls: Sequence[Call],
    load: Load,
    *,
    warm_up: Sequence[Call] = (),
    progress: Callable[[Row], None] = lambda row: None,
) -> Run:
    """Send all calls and wait for all answers. ``warm_up`` calls go first, one by one, and aren't counted."""
    cpu = ServerCpu.of(target.url)
    async with open_client(target) as client:
        for call in warm_up[:_WARM_UP]:
            await measure(client, target, call, -1, 0.0)
        done = [asyncio.Event() for _ in calls]
        rows: list[Row | None] = [None] * len(calls)
        places = asyncio.Semaphore(load.concurrency if load.rate is None else len(calls) or 1)
        start, used = time.perf_counter(), cpu.seconds()
        alone = load.concurrency == 1 and load.rate is None

        async def send(index: int, call: Call) -> None:
            if call.after is not None:
                await done[call.after].wait()
            async with places:
                first = cpu.watch() if alone else None
                row = await measure(client, target, call, index, start)
                if first is not None and row.ttft is not None:
                    row = replace(row, cpu=first.until(row.ttft))
            rows[index] = row
            done[index].set()
            progress(row)

        tasks = []
        waits = random.Random(load.seed)
        for index, call in enumerate(calls):
            if load.rate is not None and index:
                await asyncio.sleep(waits.expovariate(load.rate))
            tasks.append(asyncio.create_task(send(index, call)))
        await asyncio.gather(*tasks)
        seconds, after = time.perf_counter() - start, cpu.seconds()
    spent = None if used is None or after is None else after - used
    return Run(tuple(row for row in rows if row is not None), seconds, spent)
