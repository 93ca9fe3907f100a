"""``kvweave bench``: load against a running server."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvweave.cli.options import Json, LogLevel
from kvweave.cli.output import Progress, print_json, print_table
from kvweave.errors import InvalidOption

bench = typer.Typer(help="Measure a running server, kvweave's or another.", no_args_is_help=True)
LOAD = "Load"


@dataclass(frozen=True)
class BenchJob:
    """What ``kvweave bench serve`` was asked."""

    url: str
    model: str | None
    api_key: str | None
    workload: str
    requests: int
    concurrency: int
    rate: float | None
    documents: int
    document_tokens: int
    pool: int
    output_tokens: int
    seed: int
    docs: tuple[str, ...]
    trace: Path | None
    segments: str
    body: dict[str, Any]
    html: Path | None
    save: Path | None


@bench.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name. Default: the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.", envvar="OPENAI_API_KEY")] = None,
    workload: Annotated[
        str, typer.Option(help="fresh, repeat, permuted, dropped, chat or trace.", rich_help_panel=LOAD)
    ] = "permuted",
    requests: Annotated[int, typer.Option(min=1, help="How many.", rich_help_panel=LOAD)] = 20,
    concurrency: Annotated[int, typer.Option(min=1, help="At a time, in a closed loop.", rich_help_panel=LOAD)] = 1,
    request_rate: Annotated[
        float | None, typer.Option(help="Instead: so many a second, at random (Poisson).", rich_help_panel=LOAD)
    ] = None,
    documents: Annotated[int, typer.Option(min=0, help="Documents per request.", rich_help_panel=LOAD)] = 6,
    document_tokens: Annotated[int, typer.Option(min=1, help="About so many tokens each.", rich_help_panel=LOAD)] = 512,
    pool: Annotated[int, typer.Option(min=1, help="trace: documents there are.", rich_help_panel=LOAD)] = 40,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.", rich_help_panel=LOAD)] = 32,
    seed: Annotated[int, typer.Option(help="Everything follows from it.", rich_help_panel=LOAD)] = 0,
    docs: Annotated[list[str] | None, typer.Option(help="Files to take documents from; default: made-up text.")] = None,
    trace: Annotated[Path | None, typer.Option(help="JSONL of lists of document numbers.")] = None,
    segments: Annotated[
        str, typer.Option(help="How documents are sent: parts (with marks), text, or auto: parts to a kvweave server.")
    ] = "auto",
    body: Annotated[str, typer.Option(help='JSON that is added to every request, like {"cache":{"reuse":"fused"}}.')] = "{}",
    html: Annotated[Path | None, typer.Option(help="Write a report with plots.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write one JSON line per request.")] = None,
    json_: Json = False,
    log_level: LogLevel = "warning",
) -> None:
    """Send requests to an OpenAI-compatible server and time every piece of the answers.

        kvweave bench serve --url http://127.0.0.1:8000 --workload permuted --body '{"cache":{"reuse":"fused"}}'

    The last line of stdout is one JSON object.
    """
    if segments not in ("auto", "parts", "text"):
        raise InvalidOption(f"--segments {segments} is unknown. Use auto, parts or text.")
    if request_rate is not None and request_rate <= 0:
        raise InvalidOption("--request-rate must be above 0.")
    try:
        extra = json.loads(body)
    except ValueError as error:
        raise InvalidOption(f"--body is not JSON: {error}.") from error
    if not isinstance(extra, dict):
        raise InvalidOption("--body: expected a JSON object.")
    run(
        BenchJob(
            url=url,
            model=model,
            api_key=api_key,
            workload=workload,
            requests=requests,
            concurrency=concurrency,
            rate=request_rate,
            documents=documents,
            document_tokens=document_tokens,
            pool=pool,
            output_tokens=output_tokens,
            seed=seed,
            docs=tuple(docs or ()),
            trace=trace,
            segments=segments,
            body=extra,
            html=html,
            save=save,
        ),
        as_json=json_,
    )


def run(job: BenchJob, *, as_json: bool) -> None:
    """Measure, print, write the report."""
    from kvweave.bench.client import Target, describe
    from kvweave.bench.report import render
    from kvweave.bench.runner import Load
    from kvweave.bench.runner import run as send
    from kvweave.bench.summary import summarise
    from kvweave.bench.workloads import Shape, Texts, make_calls, read_trace

    shape = Shape(job.documents, job.document_tokens, job.pool, job.seed)
    texts = Texts(shape, _documents(job.docs))
    trace = None if job.trace is None else read_trace(job.trace)
    calls = make_calls(job.workload, job.requests, shape, texts, trace)
    warm_up = make_calls("fresh", 1, replace(shape, seed=shape.seed + 1_000_003), texts)
    server = asyncio.run(describe(job.url, job.api_key))
    parts = job.segments == "parts" or (job.segments == "auto" and "kvweave" in server)
    target = Target(
        url=job.url,
        model=job.model or str(server["id"]),
        api_key=job.api_key,
        parts=parts,
        output_tokens=job.output_tokens,
        body=job.body,
    )
    with Progress().bar(job.workload, len(calls)) as step:
        done = asyncio.run(
            send(
                target,
                calls,
                Load(job.concurrency, job.rate, job.seed),
                warm_up=warm_up,
                progress=lambda row: step(f"request {row.index}: {row.error or f'{row.ttft:.3f} s'}"),
            )
        )
    summary = {"url": job.url, "model": target.model, "workload": job.workload, "concurrency": job.concurrency}
    summary |= {"request_rate": job.rate, "documents": job.documents, "segments": "parts" if parts else "text"}
    summary |= summarise(done)
    if job.save is not None:
        job.save.write_text("".join(json.dumps(row.to_json()) + "\n" for row in done.rows))
    if job.html is not None:
        job.html.write_text(render(f"{target.model}: {job.workload}", summary, done.rows))
    if as_json:
        print_json(summary)
    else:
        _print(summary)
        print(json.dumps(summary))
    if all(row.error is not None for row in done.rows):
        sys.exit(1)


def _documents(files: tuple[str, ...]) -> list[tuple[str, str]]:
    if not files:
        return []
    from kvweave.documents import read_documents

    return [(f"doc:{i}", text) for i, text in enumerate(d.text for d in read_documents(files))]


def _print(summary: dict[str, Any]) -> None:
    columns = ("", "mean", "p50", "p90", "p95", "p99")
    names = {"ttft_ms": "first token, ms", "tpot_ms": "per output token, ms", "e2e_ms": "whole answer, ms"}
    rows = [
        [name, *("" if (v := summary[key][c]) is None else f"{v:,.1f}" for c in columns[1:])] for key, name in names.items()
    ]
    print_table(f"{summary['workload']}: {summary['requests']} requests in {summary['seconds']:.1f} s", columns, rows)
    facts = [
        ["requests a second", f"{summary['requests_per_second']:.2f}"],
        ["output tokens a second", f"{summary['output_tokens_per_second']:.1f}"],
    ]
    if summary["server_cpu_seconds"] is not None:
        facts.append(["CPU seconds of the server", f"{summary['server_cpu_seconds']:.1f}"])
    if summary["cpu_seconds_to_first_token"] is not None:
        facts.append(["... until a first token", f"{summary['cpu_seconds_to_first_token']:.2f}"])
    facts += [[f"prompt: {name.removesuffix('_tokens')}", f"{n:,}"] for name, n in summary["usage"].items() if n]
    facts += [[f"error {code}", str(n)] for code, n in summary["errors"].items()]
    print_table("", ("", ""), facts)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
