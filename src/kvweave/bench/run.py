"""One benchmark of a server: find it, warm it up, send the workload, add up."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from kvweave.bench.load import Sample, Sender
from kvweave.bench.server_cpu import ServerCpu, find_server
from kvweave.bench.streaming import UNREACHED
from kvweave.bench.summary import Summary, summarise
from kvweave.bench.target import SEGMENTS, Target, find_target
from kvweave.bench.texts import FileTexts, Library, PseudoTexts
from kvweave.bench.traces import read_trace, zipf_trace
from kvweave.bench.workloads import TRACE, Session, Shape, Workload, build, from_trace
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
    precompute: bool = False
    """First compute the KV of every document, so that it can be fused (kvweave alone)."""
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
class Precomputed:
    """What computing documents ahead cost, which no time of a request holds."""

    documents: int
    seconds: float
    server_cpu_seconds: float | None


@dataclass(frozen=True)
class Result:
    """``options`` as used, the model and the form of documents that the server got, and what came of it."""

    options: Options
    target: Target
    summary: Summary
    samples: tuple[Sample, ...]
    precomputed: Precomputed | None = None

    @property
    def asked_in_vain(self) -> bool:
        """Whether fused KV was asked for, and the server, which counts it, never used any."""
        cache = self.options.body.get("cache")
        asked = isinstance(cache, Mapping) and cache.get("reuse") == "fused"
        return asked and self.summary.completed > 0 and not self.summary.usage.get("fused_tokens")

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
            "precomputed": asdict(self.precomputed) if self.precomputed else None,
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
    refuses the warm-up or the precomputation.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=options.timeout_s, limits=limits) as client:
        target = await find_target(client, options.url, options.model, options.segments)
        target = replace(target, output_tokens=options.output_tokens, body=options.body)
        cpu = find_server(target.base)
        warm_up = (*_unrelated(options), *workload.prime)
        precomputed = None
        if options.precompute:
            precomputed = await _precompute(client, target, (*warm_up, *workload.sessions), cpu)
        target = await _warm_up(client, target, warm_up)
        alone = options.rate is None and options.concurrency == 1
        sender = Sender(client, target, cpu if alone else None, on_sample)
        before = cpu() if cpu else 0.0
        if options.rate is None:
            await sender.closed_loop(workload.sessions, options.concurrency)
        else:
            sessions_per_s = options.rate * len(workload.sessions) / workload.requests
            await sender.open_loop(workload.sessions, sessions_per_s, random.Random(options.shape.seed))
        summary = summarise(sender.samples, cpu() - before if cpu else None)
    return Result(options, target, summary, tuple(sender.samples), precomputed)


def run(options: Options, workload: Workload, on_sample: Callable[[Sample], None] = lambda sample: None) -> Result:
    """:func:`bench`, for callers without an event loop."""
    return asyncio.run(bench(options, workload, on_sample))


def _unrelated(options: Options) -> list[Session]:
    """Prompts of the workload's size that share nothing with it."""
    shape = options.shape
    library = PseudoTexts(options.document_tokens, shape.seed, "warm-up")
    return [(shape.turn(-1 - n, library.take(shape.documents)),) for n in range(options.warm_up)]


async def _precompute(
    client: httpx.AsyncClient, target: Target, sessions: Sequence[Session], cpu: ServerCpu | None
) -> Precomputed:
    if not target.marked:
        raise InvalidOption(
            "--precompute needs a kvweave server and marked documents. Leave it out, or use --segments parts."
        )
    documents = dict.fromkeys(document for session in sessions for turn in session for document in turn.documents)
    start, before = time.perf_counter(), cpu() if cpu else 0.0
    for document in documents:
        try:
            response = await client.post(target.precompute_url, json=target.precompute_request(document))
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise KvweaveError(
                f"{target.precompute_url} fails: {error or type(error).__name__}. Leave --precompute out."
            ) from error
    return Precomputed(len(documents), time.perf_counter() - start, cpu() - before if cpu else None)


async def _warm_up(client: httpx.AsyncClient, target: Target, sessions: Sequence[Session]) -> Target:
    """Returns the target in the form that the server accepts. The first request tells."""
    for number, session in enumerate(sessions):
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


async def _try(client: httpx.AsyncClient, target: Target, session: Session) -> Sample | None:
    """The sample of a request that failed, if one did."""
    sender = Sender(client, target)
    await sender.send(0, session)
    return next((sample for sample in sender.samples if sample.exchange.error is not None), None)
