"""``python -m benchmarks.fidelity``. Exit codes: 0 done, 2 wrong input, 3 a sanity gate failed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress

import kvweave
from benchmarks.fidelity.arms import KEY_ARMS, SPECS, Arm, select
from benchmarks.fidelity.measure import Bench, GateFailed, Measured, Settings
from benchmarks.fidelity.prompts import load_items
from benchmarks.fidelity.report import Row, check_gates, make_rows, print_table
from kvweave.config import Tiers
from kvweave.errors import KvweaveError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description="Distance of reuse to full prefill.")
    add = parser.add_argument
    add("--model", required=True, help="as in kvweave.LLM")
    add("--data", required=True, type=Path, action="append", help="JSONL file; may be given several times")
    add("--records", type=int, default=40)
    add("--documents", type=int, default=4, help="documents of a prompt")
    add("--document-tokens", type=int, default=448, help="each document is cut to so many")
    add("--answer-tokens", type=int, default=32, help="length of the greedy answer that is scored")
    add("--arms", nargs="+", default=list(SPECS), metavar="ARM", help="techniques, or specs such as epic:k=8")
    add("--anchor", choices=("head", "bos", "both"), default="both", help="both: head, and bos for the main arms")
    add("--draws", type=int, default=3, help="seeds of random arms")
    add("--check-records", type=int, default=3, help="records for the noise floor and arms of ratio 1")
    add("--time-records", type=int, default=6, help="records on which prefills are timed")
    add("--gold-arms", nargs="*", default=list(KEY_ARMS), metavar="ARM")
    add("--no-gold", dest="gold_arms", action="store_const", const=[])
    add("--score-arms", nargs="*", default=list(KEY_ARMS), metavar="ARM")
    add("--noise-rows", type=int, default=200, help="prefill block size of the noise floor")
    add("--prefill-rows", type=int, default=1024, help="prefill block size of everything else")
    add("--dtype", default="auto")
    add("--threads", type=int, default=1)
    add("--device", default="auto")
    add("--codec", choices=("raw", "int8", "fp8"), default="raw", help="how the documents' KV is kept")
    add("--max-minutes", type=float, default=None, help="stop early, per data file; n of a row says how far it came")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 180)
    try:
        result = run(args, console)
    except GateFailed as error:
        console.print(f"gate failed: {error}", markup=False)
        return 3
    except KvweaveError as error:
        console.print(f"error: {error}", markup=False)
        return 2
    print(json.dumps(result))
    return 0


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    arms = select(args.arms, None if args.anchor == "both" else args.anchor)
    settings = Settings(
        args.answer_tokens, args.draws, args.noise_rows, frozenset(args.gold_arms), frozenset(args.score_arms)
    )
    options = {"dtype": args.dtype, "threads": args.threads, "device": args.device, "prefill_rows": args.prefill_rows}
    sizes = {"kv_pool": "768MiB", "chunk_cache": "1GiB", "tiers": Tiers(codec=args.codec)}
    bench = Bench(args.model, list(dict.fromkeys(a.anchor for a in arms)), settings, **options, **sizes)
    rows: list[Row] = []
    files = []
    for path in args.data:
        measured = measure_file(args, bench, arms, path, console)
        found = make_rows(path.name, measured, arms)
        print_table(console, f"{bench.base.name}, {path.name}, {len(measured)} records", found)
        rows += found
        files.append({"data": path.name} | describe(measured))
    return {"meta": meta(args, bench) | {"files": files}, "rows": rows}


def measure_file(
    args: argparse.Namespace, bench: Bench, arms: Sequence[Arm], path: Path, console: Console
) -> list[Measured]:
    items = load_items(
        path, bench.base.tokenizer, records=args.records, documents=args.documents, tokens=args.document_tokens
    )
    dtype = str(bench.base.built.dtype).removeprefix("torch.")
    measured: list[Measured] = []
    started = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(path.name, total=len(items))
        for i, item in enumerate(items):
            measured.append(bench.measure(item, arms, check=i < args.check_records, timed=i < args.time_records))
            progress.advance(task)
            if not console.is_terminal:
                console.print(f"{path.name}: {i + 1} of {len(items)} records, {time.monotonic() - started:.0f} s")
            if i + 1 == min(args.check_records, len(items)):
                console.print(check_gates(measured, dtype), markup=False)
            if args.max_minutes and time.monotonic() - started > 60 * args.max_minutes:
                break
    return measured


def describe(measured: Sequence[Measured]) -> dict[str, Any]:
    anchors = dict.fromkeys(arm.anchor for m in measured for arm, s in m.samples.items() if s.reusable)
    return {
        "records": len(measured),
        "mean_prompt_tokens": fmean(m.prompt_tokens for m in measured),
        "mean_reusable_tokens": {
            anchor: fmean(next(s.reusable for arm, s in m.samples.items() if arm.anchor == anchor) for m in measured)
            for anchor in anchors
        },
    }


def meta(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    built = bench.base.built
    return {
        "model": Path(args.model).name,
        "documents": args.documents,
        "document_tokens": args.document_tokens,
        "answer_tokens": args.answer_tokens,
        "draws": args.draws,
        "codec": args.codec,
        "dtype": str(built.dtype).removeprefix("torch."),
        "attention": built.attention,
        "threads": built.threads,
        "prefill_rows": args.prefill_rows,
        "noise_rows": args.noise_rows,
        "hardware": hardware(),
        "kvweave": kvweave.__version__,
    }


def hardware() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
