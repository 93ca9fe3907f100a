"""One benchmark of a server: find it, warm it up, send the workload, add up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from kvweave.bench.load import Sample, Sender
from kvweave.bench.server_cpu import find_server
from kvweave.bench.streaming import UNREACHED
from kvweave.bench.summary import Summary, summarise
from kvweave.bench.target import SEGMENTS, Target, find_target
from kvweave.bench.texts import FileTexts, Library, PseudoTexts
from kvweave.bench.traces import read_trace, zipf_trace
from kvweave.bench.workloads import TRACE, Shape, Workload, build, from_trace
from kvweave.documents import read_documents
from kvweave.errors import InvalidOption, KvweaveError, Unavailable


@dataclass(frozen=True)
class Options:
    """What to send where. Checked when made: ``InvalidOption`` names the flag that is wrong.

    ``rate`` is in requests per second; None sends ``concurrency`` at a time instead. ``document_tokens`` and ``pool``
    are of made-up texts and traces; ``docs`` and ``trace`` replace them.
    """

    url: str
    shape: Shape
    workload: str = "fresh"
    model: str | None = None
    api_key: str | None = None
    concurrency: int = 1
    rate: float | None = None
    warm_up: int = 1
    document_tokens: int = 512
    docs: tuple[str, ...] = ()
    trace: Path | None = None
    pool: int = 64
    output_tokens: int = 32
    segments: str = "auto"
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("concurrency", "warm_up", "document_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"--{name.replace('_', '-')} is {getattr(self, name)}. Use 1 or more.")
        for name, value in (("--request-rate", self.rate), ("--timeout", self.timeout_s)):
            if value is not None and not 0 < value < float("inf"):
                raise InvalidOption(f"{name} is {value}. Use a number above 0.")
        if self.rate is not None and self.concurrency != 1:
            raise InvalidOption("--request-rate and --concurrency exclude each other. Use one of them.")
        if self.segments not in SEGMENTS:
            raise InvalidOption(f"--segments '{self.segments}' is unknown. Use one of {', '.join(SEGMENTS)}.")
        if self.trace is not None and (self.workload != TRACE or not self.docs):
            raise InvalidOption("--trace names documents by id: use it with --workload trace and --docs FILES.")


@dataclass(frozen=True)
class Result:
    """``options`` as used, the model and the form of documents that the server got, and what came of it."""

    options: Options
    target: Target
    summary: Summary
    samples: tuple[Sample, ...]

    def as_json(self) -> dict[str, Any]:
        options = self.options
        return {
            "url": self.target.base,
            "model": self.target.model,
            "workload": options.workload,
            **asdict(options.shape),
            "document_tokens": None if options.docs else options.document_tokens,
            "output_tokens_per_request": options.output_tokens,
            "ignore_eos": self.target.ignore_eos,
            "concurrency": None if options.rate else options.concurrency,
            "request_rate": options.rate,
            "segments": "parts" if self.target.marked else "text",
            "body": dict(options.body),
            **asdict(self.summary),
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a request, in the order of sending; times in seconds, ``sent_s`` since the first was sent."""
        ordered = sorted(self.samples, key=lambda sample: sample.exchange.sent_at)
        for sample in ordered:
            row = asdict(sample.exchange)
            del row["text"]
            start = row.pop("sent_at") - ordered[0].exchange.sent_at
            yield {"session": sample.session, "turn": sample.turn, "sent_s": start, "tpot_s": sample.exchange.tpot_s, **row}


def make_workload(options: Options) -> Workload:
    """Raises ``InvalidOption`` or ``DocumentError`` where documents or trace don't serve."""
    shape, documents = options.shape, read_documents(options.docs) if options.docs else []
    if options.workload == TRACE and options.trace is not None:
        return from_trace(read_trace(options.trace, documents, shape.requests), shape.seed)
    library: Library = FileTexts(documents) if options.docs else PseudoTexts(options.document_tokens, shape.seed)
    if options.workload == TRACE:
        return from_trace(zipf_trace(library, shape.requests, shape.documents, options.pool, shape.seed), shape.seed)
    return build(options.workload, shape, library)


async def bench(options: Options, workload: Workload, on_sample: Callable[[Sample], None]) -> Result:
    """Run ``workload``; ``on_sample`` is called after each measured request.

    Raises ``Unavailable`` if no server answers, ``InvalidOption`` for a model it doesn't serve, ``KvweaveError`` if it
    refuses the warm-up.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=options.timeout_s, limits=limits) as client:
        target = await find_target(client, options.url, options.model, options.segments)
        target = replace(target, output_tokens=options.output_tokens, body=options.body)
        target = await _warm_up(client, target, options, workload)
        cpu = find_server(target.base)
        alone = options.rate is None and options.concurrency == 1
        sender = Sender(client, target, cpu if alone else None, on_sample)
        before = cpu() if cpu else 0.0
        if options.rate is None:
            await sender.closed_loop(workload.sessions, options.concurrency)
        else:
            sessions_per_s = options.rate * len(workload.sessions) / workload.requests
            await sender.open_loop(workload.sessions, sessions_per_s, random.Random(options.shape.seed))
        summary = summarise(sender.samples, cpu() - before if cpu else None)
    return Result(options, target, summary, tuple(sender.samples))


def run(options: Options, workload: Workload, on_sample: Callable[[Sample], None] = lambda sample: None) -> Result:
    """:func:`bench`, for callers without an event loop."""
    return asyncio.run(bench(options, workload, on_sample))


async def _warm_up(client: httpx.AsyncClient, target: Target, options: Options, workload: Workload) -> Target:
    """Unrelated prompts of the workload's size, then what it wants primed. Returns the target in the form it accepts."""
    shape = options.shape
    library = PseudoTexts(options.document_tokens, shape.seed, "warm-up")
    sessions = [(shape.turn(-1 - n, library.take(shape.documents)),) for n in range(options.warm_up)]
    for number, session in enumerate([*sessions, *workload.prime]):
        failed = await _try(client, target, session)
        if failed and number == 0 and "ignore_eos" in failed.exchange.message:
            target = target.without_ignore_eos()
            failed = await _try(client, target, session)
        if failed:
            error, message = failed.exchange.error, failed.exchange.message
            if error == UNREACHED:
                raise Unavailable(f"No server answers at {target.base} ({message}). Start it, or check --url.")
            raise KvweaveError(f"{target.base} fails at the warm-up ({error}): {message or 'no message'}")
    return target


async def _try(client: httpx.AsyncClient, target: Target, session: tuple[Any, ...]) -> Sample | None:
    """The sample of a request that failed, if one did."""
    sender = Sender(client, target)
    await sender.send(0, session)
    return next((sample for sample in sender.samples if sample.exchange.error is not None), None)
