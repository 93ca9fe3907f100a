"""``kvweave eval``: its commands and their options. Bodies import what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvweave.cli.environment import home_from_environment
from kvweave.cli.options import (
    REUSE,
    ChunkCache,
    Codec,
    Device,
    Dtype,
    Json,
    KvPool,
    LogLevel,
    MaxModelLen,
    Threads,
    threads_of,
)

evaluate = typer.Typer(
    rich_markup_mode="rich",
    help="Measure what reuse costs in fidelity, and open the quality gate where it is little enough.",
    epilog="Exit codes: 0 the gate is open, 1 failed, 2 usage, 3 measured, and the gate is closed.",
)


@evaluate.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@evaluate.command("gate")
def measure_gate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="'demo', a model directory, a .gguf or .whl file, or a hub name.", show_default=False
        ),
    ],
    technique: Annotated[
        str | None, typer.Option(help="NAME or NAME:option=value; default: the one that fused reuse takes.")
    ] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of reused tokens computed again, 0 to 1.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL, one {question, documents[]} a line. Default: prompts that kvweave ships."),
    ] = None,
    limit: Annotated[float, typer.Option(help="Most divergence, in nats.")] = 0.05,
    records: Annotated[int | None, typer.Option(metavar="N", min=1, help="The first N prompts alone.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but leave the gate as it is.")] = False,
    anchor: Annotated[
        str, typer.Option(help="What documents are computed behind: head (of the prompt) or bos.", rich_help_panel=REUSE)
    ] = "head",
    codec: Codec = "raw",
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
    """Compare a technique with full prefill; open its gate if it is close enough, else close it.

    What is compared are the next-token distributions over the first 32 tokens of the answer that full prefill gives, as
    KL(full || fused) in nats. The gate opens if the upper 95 % bound of the mean over prompts isn't above the limit.

    kvweave eval gate demo --technique question --ratio 0.3
    """
    from kvweave.cli.eval_gate import GateJob, run

    engine: dict[str, Any] = {"device": device, "dtype": dtype, "threads": threads_of(threads), "anchor": anchor}
    engine |= {"max_model_len": max_model_len, "kv_pool": kv_pool, "chunk_cache": chunk_cache}
    job = GateJob.of(
        data=data,
        records=records,
        engine={**engine, "home": home_from_environment()},
        codec=codec,
        model=model,
        technique=technique,
        ratio=ratio,
        limit=limit,
        dry_run=dry_run,
    )
    return run(job, as_json=json, quiet=quiet)


@evaluate.command("show")
def show_gates(json: Json = False, log_level: LogLevel = "warning") -> None:
    """Which gates were measured, with what they found."""
    from kvweave.cli.eval_gate import show

    show(home_from_environment(), as_json=json)
