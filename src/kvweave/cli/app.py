"""Commands and their options. Bodies import what they need, so that help and usage errors answer at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from kvweave import __version__
from kvweave.cli.bench import bench
from kvweave.cli.cache import cache
from kvweave.cli.environment import home_from_environment
from kvweave.cli.eval import evaluate
from kvweave.cli.explain import explain
from kvweave.cli.options import (
    REUSE,
    SAMPLING,
    TIERS,
    ChunkCache,
    Codec,
    Controller,
    Device,
    DiskTier,
    Dtype,
    Json,
    KvPool,
    LogLevel,
    MaxModelLen,
    Model,
    RemoteTier,
    SecretFile,
    Tenant,
    Threads,
    threads_of,
    tiers_of,
)
from kvweave.cli.serve import config, serve

app = typer.Typer(
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Serve decoder LLMs and reuse KV cache wherever text repeats, not only at the start of a prompt.",
    epilog="Exit codes: 0 fine, 1 failed or interrupted, 2 usage or configuration, 3 a check ran and the answer is no.",
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"kvweave {__version__}")
        raise typer.Exit


app.add_typer(cache, name="cache")
app.add_typer(evaluate, name="eval")
app.add_typer(bench, name="bench")
app.command()(serve)
app.command()(explain)
app.add_typer(config, name="config")


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    home_from_environment()  # a misspelt variable stops every command


@app.command()
def ask(
    words: Annotated[
        list[str],
        typer.Argument(metavar="QUESTION", help="The last word. Words in front of it are more FILES.", show_default=False),
    ],
    docs: Annotated[
        list[str],
        typer.Option(
            "--docs", metavar="FILES...", help="Text, Markdown and JSONL files, and folders of them.", show_default=False
        ),
    ],
    model: Model = "demo",
    technique: Annotated[
        str | None,
        typer.Option(
            help="How documents are reused, as NAME or NAME:option=value. See: kvweave techniques", rich_help_panel=REUSE
        ),
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Share of reused tokens computed again, 0 to 1.", rich_help_panel=REUSE)
    ] = None,
    reuse: Annotated[
        Literal["off", "exact", "fused"] | None,
        typer.Option(help="Without --technique: which kind is used. Default: fused.", rich_help_panel=REUSE),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Answer by full prefill too, and tell how far apart they are.", rich_help_panel=REUSE
        ),
    ] = False,
    anchor: Annotated[
        str, typer.Option(help="What documents are computed behind: head (of this prompt) or bos.", rich_help_panel=REUSE)
    ] = "head",
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.", rich_help_panel=SAMPLING)] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of this total.", rich_help_panel=SAMPLING)
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many tokens; 0: all.", rich_help_panel=SAMPLING)] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.", rich_help_panel=SAMPLING)] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the answer in front of this text; may be repeated.", rich_help_panel=SAMPLING),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = "auto",
    max_model_len: MaxModelLen = None,
    kv_pool: KvPool = "auto",
    chunk_cache: ChunkCache = "2GiB",
    disk_tier: DiskTier = None,
    remote_tier: RemoteTier = None,
    codec: Codec = "raw",
    tenant: Tenant = "default",
    secret_file: SecretFile = None,
    controller: Controller = "auto",
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The answer alone: no progress, no accounting.")] = False,
    log_level: LogLevel = "warning",
) -> None:
    """Answer a question over documents, with a line that says how the prompt was computed.

    The documents enter the prompt in the order given. The question is the last word of the command line.

        kvweave ask --docs notes/ report.md "Who signed the treaty?" --compare
    """
    from kvweave.cli.ask import AskJob, run

    engine: dict[str, Any] = {"device": device, "dtype": dtype, "threads": threads_of(threads)}
    engine |= {"max_model_len": max_model_len, "kv_pool": kv_pool, "chunk_cache": chunk_cache, "anchor": anchor}
    engine |= {"home": home_from_environment(), "tenant": tenant, "controller": controller}
    engine |= {"tiers": tiers_of(disk_tier, remote_tier, codec, secret_file)}
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    run(
        AskJob.of(
            docs=docs,
            words=words,
            sampling={**sampling, "stop": tuple(stop or ())},
            engine=engine,
            model=model,
            technique=technique,
            ratio=ratio,
            reuse=reuse,
        ),
        compare=compare,
        as_json=json,
        quiet=quiet,
    )


@app.command()
def precompute(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Text, Markdown and JSONL files, and folders of them.", show_default=False),
    ],
    model: Model = "demo",
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to", help="disk, remote or host: these tiers alone; may be repeated. Default: all.", rich_help_panel=TIERS
        ),
    ] = None,
    disk_tier: DiskTier = None,
    remote_tier: RemoteTier = None,
    codec: Codec = "raw",
    tenant: Tenant = "default",
    secret_file: SecretFile = None,
    anchor: Annotated[
        str, typer.Option(help="What documents are computed behind: head (as in ask) or bos.", rich_help_panel=REUSE)
    ] = "head",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = "auto",
    max_model_len: MaxModelLen = None,
    kv_pool: KvPool = "auto",
    chunk_cache: ChunkCache = "2GiB",
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    log_level: LogLevel = "warning",
) -> int:
    """Compute KV of documents once and keep it in the tiers. What is there already costs nothing, so it may be interrupted.

    kvweave precompute notes/ --disk-tier ~/kv:20GiB
    """
    from kvweave.cli.precompute import PrecomputeJob, run

    engine: dict[str, Any] = {"device": device, "dtype": dtype, "threads": threads_of(threads), "anchor": anchor}
    engine |= {"max_model_len": max_model_len, "kv_pool": kv_pool, "chunk_cache": chunk_cache, "tenant": tenant}
    tiers = tiers_of(disk_tier, remote_tier, codec, secret_file)
    job = PrecomputeJob.of(
        files=files, to=to or [], tiers=tiers, engine={**engine, "home": home_from_environment()}, model=model
    )
    return run(job, as_json=json, quiet=quiet)


@app.command()
def models(json: Json = False, log_level: LogLevel = "warning") -> None:
    """Which model families run, and which are refused and why."""
    from kvweave.cli.listings import show_models

    show_models(as_json=json)


@app.command()
def techniques(json: Json = False, log_level: LogLevel = "warning") -> None:
    """Which reuse techniques there are, with their options."""
    from kvweave.cli.listings import show_techniques

    show_techniques(as_json=json)


@app.command()
def doctor(
    model: Model = "demo",
    no_model: Annotated[bool, typer.Option("--no-model", help="Look at the machine alone; load no model.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = "auto",
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    log_level: LogLevel = "warning",
) -> int:
    """What this machine offers, what kvweave chose on it, and whether a model runs right. Exit code 3: a check failed."""
    from kvweave.cli.doctor import examine

    engine = {"device": device, "dtype": dtype, "threads": threads_of(threads), "home": home_from_environment()}
    return examine(None if no_model else model, engine, as_json=json, quiet=quiet)
