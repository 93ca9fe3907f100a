"""``kvweave bench``: load against a running server, and what came back as a table, JSON, HTML and rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.entry import FAILED
from kvweave.cli.options import Json, LogLevel
from kvweave.cli.output import LOG, Progress, complain, print_table
from kvweave.errors import InvalidOption

if TYPE_CHECKING:
    from kvweave.bench.load import Sample
    from kvweave.bench.run import Result

bench = typer.Typer(help="Measure a running server, kvweave's or another.", no_args_is_help=True)
LOAD, PROMPTS, OUTPUT = "Load", "Prompts", "Output"


@bench.callback()
def _group() -> None:
    """Keeps ``serve`` a command with a name of its own while it is the only one."""


@bench.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="Address of any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name. Default: the server's first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.", envvar="OPENAI_API_KEY")] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="fresh (nothing repeats), repeat (whole prompts), permuted (documents in a new order), dropped (known "
            "prompts, a document less), chat (growing conversations) or trace (new combinations of documents).",
            rich_help_panel=PROMPTS,
        ),
    ] = "permuted",
    requests: Annotated[int, typer.Option(help="How many.", rich_help_panel=LOAD)] = 20,
    concurrency: Annotated[int, typer.Option(help="At a time, in a closed loop.", rich_help_panel=LOAD)] = 1,
    request_rate: Annotated[
        float | None, typer.Option(help="Instead: so many a second, at random (Poisson).", rich_help_panel=LOAD)
    ] = None,
    warm_up: Annotated[int, typer.Option(help="Unrelated requests in front that don't count.", rich_help_panel=LOAD)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds of silence that fail a request.", rich_help_panel=LOAD)] = 600.0,
    output_tokens: Annotated[int, typer.Option(help="Length of each answer.", rich_help_panel=LOAD)] = 32,
    documents: Annotated[int, typer.Option(help="Documents per request.", rich_help_panel=PROMPTS)] = 6,
    document_tokens: Annotated[int, typer.Option(help="About so many tokens each.", rich_help_panel=PROMPTS)] = 512,
    sets: Annotated[
        int, typer.Option(help="repeat, permuted, dropped: different groups of documents.", rich_help_panel=PROMPTS)
    ] = 1,
    turns: Annotated[int, typer.Option(help="chat: turns of a conversation.", rich_help_panel=PROMPTS)] = 4,
    pool: Annotated[int, typer.Option(help="trace: documents there are.", rich_help_panel=PROMPTS)] = 40,
    docs: Annotated[
        list[str] | None,
        typer.Option(help="File or folder of documents; may be repeated. Default: made-up text.", rich_help_panel=PROMPTS),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSONL; a line is a list of ids of --docs.", rich_help_panel=PROMPTS)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Fixes all texts. Default: a new one, as a server may remember those of the last run.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    segments: Annotated[
        str,
        typer.Option(
            help="How documents are sent: parts (with marks), text, or auto: parts to a kvweave server.",
            rich_help_panel=PROMPTS,
        ),
    ] = "auto",
    body: Annotated[
        str,
        typer.Option(help='JSON that is added to every request, like {"cache":{"reuse":"fused"}}.', rich_help_panel=PROMPTS),
    ] = "{}",
    precompute: Annotated[
        bool,
        typer.Option(
            "--precompute", help="First have a kvweave server compute all documents, to be fused.", rich_help_panel=PROMPTS
        ),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots.", rich_help_panel=OUTPUT)] = None,
    save: Annotated[Path | None, typer.Option(help="Write one JSON line per request.", rich_help_panel=OUTPUT)] = None,
    json_: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    log_level: LogLevel = "warning",
) -> int:
    """Send requests to an OpenAI-compatible server and time every piece of the answers.

        kvweave bench serve --url http://127.0.0.1:8000 --precompute --body '{"cache":{"reuse":"fused"}}'

    The last line of stdout is one JSON object; with --json there is no other.
    """
    from kvweave.bench.run import Options, make_workload, run
    from kvweave.bench.workloads import Shape

    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    options = Options(
        url=url,
        shape=Shape(requests, documents, sets=sets, turns=turns, seed=seed),
        workload=workload,
        model=model,
        api_key=api_key,
        concurrency=concurrency,
        rate=request_rate,
        warm_up=warm_up,
        document_tokens=document_tokens,
        docs=tuple(docs or ()),
        trace=trace,
        pool=pool,
        output_tokens=output_tokens,
        segments=segments,
        body=_object(body),
        precompute=precompute,
        timeout_s=timeout,
    )
    for file in (html, save):
        _check_writable(file)
    prompts = make_workload(options)
    with Progress(quiet).bar(workload, prompts.requests) as step:
        result = run(options, prompts, _told(step))
    _write(result, html, save)
    if not json_:
        _print(result)
    print(json.dumps(result.as_json(), allow_nan=False))
    if result.asked_in_vain:
        LOG.warning("Fused KV was asked for and none was used. Add --precompute, and look at the gates in /v1/models.")
    if not result.summary.completed:
        complain(f"No request was answered ({', '.join(result.summary.errors)}). Look into the server's log.")
        return FAILED
    return 0


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidOption(f"--body is not JSON: {error}. Quote it for the shell, as in --body '{{\"n\": 1}}'.") from error
    if not isinstance(value, dict):
        raise InvalidOption(f"--body is no JSON object: {text}. Use one such as '{{\"n\": 1}}'.")
    return value


def _check_writable(file: Path | None) -> None:
    """Told before the run, not after it."""
    if file is None:
        return
    try:
        file.open("a").close()
    except OSError as error:
        raise InvalidOption(f"'{file}' can't be written: {error.strerror}. Name another file.") from error


def _told(step: Callable[[str], None]) -> Callable[[Sample], None]:
    def tell(sample: Sample) -> None:
        one = sample.exchange
        step(one.error or f"first token after {one.ttft_s:.3f} s, {one.output_tokens} tokens in {one.e2e_s:.3f} s")

    return tell


def _write(result: Result, html: Path | None, save: Path | None) -> None:
    from kvweave.bench.report import page

    if save is not None:
        save.write_text("".join(json.dumps(row) + "\n" for row in result.rows()), encoding="utf-8")
    if html is not None:
        html.write_text(page(result), encoding="utf-8")


def _print(result: Result) -> None:
    from kvweave.bench.tables import facts, latency_rows, token_rows

    print_table("", ("", ""), facts(result))
    print_table("Latency", *latency_rows(result.summary))
    print_table("Tokens", *token_rows(result.summary))
    if result.summary.errors:
        print_table("Errors", ("code", "requests"), [(code, str(count)) for code, count in result.summary.errors.items()])
