"""``python -m benchmarks.store``: the tiers against the disk they stand on, and against computing everything.

Everything alternates in one process. CPU seconds stand beside wall time. Throttled disks are the local disk behind a token
bucket: they show what a slower medium would do, and are named so. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fusion.__main__ import Ours
from benchmarks.store import throughput
from benchmarks.store.media import Throttled, redis_url
from benchmarks.store.ttft import Arm, bytes_as_predicted, measure
from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.engine.profile import calibrate
from kvweave.llm import LLM
from kvweave.store.aligned import direct_works
from kvweave.store.base import Blobs
from kvweave.store.disk import DiskBlobs
from kvweave.store.tiered import TieredStore

THROTTLES = {"disk, 150 MB/s and 8 ms a read": (150e6, 0.008), "disk, 35 MB/s": (35e6, 0.0)}
LARGE = KVLayout((LayerSpec(32, 8, 128, 128),) * 32, torch.bfloat16)
"""A chunk of 512 tokens of an 8B model with grouped-query attention: 64 MiB."""
TECHNIQUES = ("cacheblend:ratio=0.15", "epic:ratio=0.15")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--home", default=None, help="folder of fetched models")
    parser.add_argument("--folder", type=Path, default=None, help="where the stores are made; default: the temporary folder")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--records", type=int, default=32, help="records of the throughput measurement")
    parser.add_argument("--restart-records", type=int, default=10_000)
    parser.add_argument("--io-threads", type=int, default=4)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        result = run(args, Path(name), console)
    show(result, console)
    print(json.dumps(result))
    return 0


def run(args: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    threads = args.threads if args.threads == "auto" else int(args.threads)
    llm = LLM(args.model, home=args.home, threads=threads, dtype=args.dtype)
    layout = llm.engine.parts.pool.layout
    rates = []
    for label, shape, count, codec in (
        (llm.name, layout, args.records, "raw"),
        (llm.name, layout, args.records, "int8"),
        ("8B shape", LARGE, max(1, args.records // 8), "raw"),
    ):
        console.print(f"throughput, {label}, codec {codec}")
        found = throughput.measure(
            shape,
            folder,
            count=count,
            repeat=args.repeat,
            threads=args.io_threads,
            codec=codec,  # type: ignore[arg-type]
        )
        rates.append({"layout": label} | found)
    console.print("restart")
    restarted = throughput.restart(folder, args.restart_records)
    with ExitStack() as stack:
        url = stack.enter_context(redis_url())
        arms, ours = make_arms(llm, folder, url, args.io_threads)
        rows = measure(arms, ours, args.repeat, lambda line: console.print(line))
        predicted = bytes_as_predicted(arms["disk, epic:ratio=0.15"], ours)
    return {
        "write_ratio": rates[0]["write_ratio"],
        "read_ratio": rates[0]["read_ratio"],
        "write_ratio_8b": rates[2]["write_ratio"],
        "read_ratio_8b": rates[2]["read_ratio"],
        "write_gbs": rates[0]["write_gbs"],
        "read_gbs": rates[0]["read_gbs"],
        "ttft_ratio_disk_cacheblend": rows["disk, cacheblend:ratio=0.15"]["ttft_ratio"],
        "overlap_disk_cacheblend": rows["disk, cacheblend:ratio=0.15"]["overlap"],
        "bytes_as_predicted": all(row["equal"] for row in predicted),
        "restart_s": restarted["with_catalogue_first_open_s"],
        "throughput": rates,
        "restart": restarted,
        "ttft": rows,
        "bytes": predicted,
        "meta": {
            "model": llm.name,
            "dtype": str(llm.built.dtype).removeprefix("torch."),
            "threads": llm.built.threads,
            "io_threads": args.io_threads,
            "prompt_tokens": len(ours.prompt.token_ids),
            "repeat": args.repeat,
            "direct_io": direct_works(str(folder / "probe")),
        },
    }


def make_arms(llm: LLM, folder: Path, url: str | None, threads: int) -> tuple[dict[str, Arm], Ours]:
    """Documents are computed once per medium; host memory keeps nothing where a slower medium is measured."""
    media: dict[str, Blobs] = {"disk": DiskBlobs(folder / "ttft", 8 * 2**30)}
    if url is not None:
        from kvweave.store.remote import open_remote

        media["redis"] = open_remote(f"{url}?timeout=30s")
    arms = {"full prefill": Arm(llm, None, "full", None, threads)}
    ours = _fill(llm, arms["full prefill"], 2 * 2**30)
    for technique in TECHNIQUES:
        arm = Arm(llm, None, technique, None, threads, host=2 * 2**30)
        _fill(llm, arm)
        arms[f"host, {technique}"] = arm
        for name, medium in media.items():
            arm = Arm(llm, medium, technique, None, threads)
            _fill(llm, arm)
            arms[f"{name}, {technique}"] = arm
    for name, (rate, seek) in THROTTLES.items():
        slow = Throttled(media["disk"], rate, seek, name)
        arms[f"{name}, cacheblend:ratio=0.15"] = Arm(llm, slow, "cacheblend:ratio=0.15", None, threads)
        arms[f"{name}, controller"] = Arm(llm, slow, "cacheblend:ratio=0.15", "auto", threads)
    calibrate(llm.engine, llm.engine.profile)
    return arms, ours


def _fill(llm: LLM, arm: Arm, _host: int = 0) -> Ours:
    arm.use()
    ours = Ours(llm, "head")
    store: TieredStore = arm.store
    store.flush()
    return ours


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(
        "medium and technique", "TTFT s", "of full", "CPU s", "wait ms", "transfer ms", "overlap", "MB read", "decision"
    )
    for name, row in result["ttft"].items():
        overlap = "" if row["overlap"] is None else f"{row['overlap']:.2f}"
        decision = row.get("decision")
        table.add_row(
            name,
            f"{row['ttft_s']:.2f}",
            f"{row['ttft_ratio']:.3f}",
            f"{row['cpu_s']:.2f}",
            f"{row['load_wait_ms']:.0f}",
            f"{row['transfer_ms']:.0f}",
            overlap,
            f"{sum(row['bytes'].values()) / 1e6:.0f}",
            "" if decision is None else f"{decision['run']}, r = {decision['ratio']:.2f}",
        )
    console.print(table)
    for rate in result["throughput"]:
        parts = (
            f"{what} {rate[f'{what}_gbs']:.2f} GB/s ({rate[f'{what}_ratio']:.2f} of the disk's)"
            for what in ("write", "read")
        )
        console.print(f"{rate['layout']}, {rate['codec']}: {', '.join(parts)}")
    console.print(f"restart: {result['restart']}; bytes as predicted: {result['bytes']}")


if __name__ == "__main__":
    sys.exit(main())
