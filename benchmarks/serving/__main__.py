"""``python -m benchmarks.serving``: time to first token and throughput of kvweave's server beside others.

Every peer is started in turn on a free port, with the same model, and gets the same texts from the same client. CPU seconds
stand beside wall time, as other work on the machine changes only the latter. A peer that isn't there is skipped with a note.
Stdout has a line of JSON a row, and last one object of them all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.serving.measure import WORKLOADS, Plan, Row, measure, read_retrieval, speed_ups
from benchmarks.serving.peers import NAMES, NotStarted, Peer, Setup, make_peers, running
from kvweave.bench.workloads import TRACE
from kvweave.errors import KvweaveError

PREFIX_CACHING = "kvweave"
_PIPE_WIDTH = 120


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else _PIPE_WIDTH)
    setup = Setup(
        model=args.model,
        threads=args.threads,
        context=args.context,
        users=max(args.concurrency),
        technique=args.technique,
        vllm_python=args.vllm_python,
        llama_server=args.llama_server,
        gguf=args.gguf,
    )
    plan = Plan(
        workloads=tuple(args.workloads),
        concurrency=tuple(args.concurrency),
        requests=args.requests,
        documents=args.documents,
        document_tokens=args.document_tokens,
        output_tokens=args.output_tokens,
        queries=args.queries,
        trace=read_retrieval(args.trace) if args.trace else (),
        seed=args.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        peers = {name: peer for name, peer in make_peers(setup).items() if name in args.peers}
        found, skipped = compare(peers, plan, logs, args.patience, console.print)
    show(found, console)
    ratios = speed_ups(found, PREFIX_CACHING)
    for peer, ratio in ratios.items():
        console.print(
            f"trace, over {PREFIX_CACHING}: {peer} {ratio['first_quarter']:.2f}x, then {ratio['last_quarter']:.2f}x"
        )
    meta = {
        "threads": setup.threads,
        "processor": platform.processor() or platform.machine(),
        "trace": str(args.trace or ""),
    }
    print(json.dumps({"rows": found, "trace_speed_up": ratios, "skipped": skipped, "meta": meta}))
    return 0 if found else 1


def compare(
    peers: Mapping[str, Peer | str], plan: Plan, logs: Path, patience_s: float, told: Callable[[str], None]
) -> tuple[list[Row], dict[str, str]]:
    """Rows of the peers that ran, and why the others didn't; a peer that fails on the way keeps the rows it has."""
    found: list[Row] = []
    skipped = {name: peer for name, peer in peers.items() if isinstance(peer, str)}

    def keep(row: Row) -> None:
        found.append(row)
        print(json.dumps(row), flush=True)  # a run takes long: what is measured isn't lost where it is cut short
        load = f"{row['workload']}, {row['concurrency']} at a time"
        told(f"{row['peer']}, {load}: TTFT {_cell(row['ttft_ms'], 0)} ms, {sum(row['errors'].values())} failed")

    for name, peer in peers.items():
        if isinstance(peer, str):
            continue
        try:
            with running(peer, logs / f"{name}.log", patience_s) as url:
                measure(peer, url, plan, keep)
        except (NotStarted, KvweaveError) as error:
            skipped[name] = str(error)
    for name, reason in skipped.items():
        told(f"{name} is left out: {reason}")
    return found, skipped


def show(found: Sequence[Row], console: Console) -> None:
    table = Table(
        "workload", "at a time", "peer", "TTFT ms", "p95", "CPU s to first", "TPOT ms", "tokens/s", "cached", "failed"
    )
    for row in sorted(found, key=lambda row: ((*WORKLOADS, TRACE).index(row["workload"]), row["concurrency"])):
        table.add_row(
            row["workload"],
            str(row["concurrency"]),
            row["peer"],
            _cell(row["ttft_ms"], 0),
            _cell(row["ttft_p95_ms"], 0),
            _cell(row["cpu_seconds_to_first_token"], 3),
            _cell(row["tpot_ms"], 1),
            _cell(row["output_tokens_per_second"], 1),
            *(_share(row["usage"].get(name), row["prompt_tokens"]) for name in ("cached_tokens", "fused_tokens")),
            str(sum(row["errors"].values())),
        )
    console.print(table)


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _share(tokens: int | None, of: int) -> str:
    return f"{tokens / of:.0%}" if tokens is not None and of else ""


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, for kvweave and vLLM")
    parser.add_argument("--peers", type=_names, default=NAMES, help=f"of {','.join(NAMES)}; default: all")
    parser.add_argument("--vllm-python", type=Path, help="of the environment vLLM is installed in")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--technique", help="of kvweave-fused; default: the server's")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--requests", type=int, default=16, help="of each workload")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--document-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--queries", type=int, default=400, help="of the retrieval trace; 0 leaves it out")
    parser.add_argument("--trace", type=Path, help="JSONL of objects with retrieved_docs; default: drawn by Zipf's law")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server")
    parser.add_argument("--context", type=int, default=8192, help="longest prompt plus answer, in tokens")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for a server to come up")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs; default: thrown away")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a server that runs is stopped as well
    sys.exit(main())
