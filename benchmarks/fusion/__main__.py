"""``python -m benchmarks.fusion``: 8 documents x 512 tokens and a question, against transformers, in one process.

A and B alternate, so that a disturbance hits both. CPU seconds stand beside wall time: where they disagree with
wall x threads, something else was running. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.fusion.limit import decode_limit, prefill_limit
from benchmarks.fusion.profile import breakdown
from benchmarks.fusion.transformers_side import Native
from kvweave.core.prompt import Document, TokenPrompt, TokenSpan
from kvweave.core.sampling import SamplingParams
from kvweave.engine.precompute import precompute
from kvweave.engine.sequence import Request
from kvweave.engine.tuning import gemm_rate, memory_bandwidth
from kvweave.llm import LLM
from kvweave.models.sources import resolve
from kvweave.reuse.registry import make_technique

DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 8, 512, 24
ARMS = ("full", "cacheblend:ratio=0.15", "epic:k=16", "question:ratio=0.15", "naive")


@dataclass(frozen=True)
class Timing:
    """Median wall and CPU seconds, and all wall times."""

    wall: float
    cpu: float
    all: tuple[float, ...]


def alternate(runs: dict[str, Callable[[], object]], repeat: int) -> dict[str, Timing]:
    """Time each of ``runs`` ``repeat`` times, in turns, after one warm-up round."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            run()
            if turn:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - start_cpu)
    return {n: Timing(median(wall[n]), median(cpu[n]), tuple(wall[n])) for n in runs}


class Ours:
    """kvweave on synthetic documents: exactly ``DOCUMENT_TOKENS`` ids each."""

    def __init__(self, llm: LLM, anchor: str) -> None:
        self.llm, self.engine = llm, llm.engine
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.engine.parts.adapter.vocab_size

        def ids(n: int) -> tuple[int, ...]:
            return tuple(torch.randint(16, vocabulary, (n,), generator=generator).tolist())

        bos = llm.tokenizer.bos_id if llm.tokenizer.bos_id is not None else 0
        self.head = (bos, *ids(15))
        documents = [ids(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
        behind = self.head if anchor == "head" else (bos,)
        for document in documents:
            precompute(self.engine, document, behind)
        spans = [TokenSpan(d, Document(str(i))) for i, d in enumerate(documents)]
        self.prompt = TokenPrompt((TokenSpan(self.head), *spans, TokenSpan(ids(QUESTION_TOKENS))))
        self.anchors = (behind,)

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor(self.prompt.token_ids)

    def run(self, technique: str, max_tokens: int = 1) -> Any:
        """One request with a cold prefix tree; returns its report."""
        made = make_technique(technique)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.llm.reset_prefix_cache()
        (output,) = self.engine.run([self.engine.add(Request(self.prompt, params, made, made.reuse, self.anchors))])
        return output.reuse

    def decode_ms(self, tokens: int) -> float:
        """Milliseconds a token behind the whole prompt (naive prefill: its cost doesn't matter)."""
        report = self.run("naive", tokens + 1)
        return report.timings["decode_ms"] / tokens


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--home", default=None, help="folder of fetched models")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--anchor", choices=("head", "bos"), default="head", help="head: the first document is exact")
    parser.add_argument("--profile", action="store_true", help="where the time of each arm goes, by kind of work")
    args = parser.parse_args(argv)
    threads = args.threads if args.threads == "auto" else int(args.threads)
    llm = LLM(args.model, home=args.home, threads=threads, dtype=args.dtype, anchor=args.anchor)
    ours = Ours(llm, args.anchor)
    directory = resolve(args.model, home=args.home).directory
    natives = {str(d).removeprefix("torch."): Native(directory, d, ours.token_ids) for d in (torch.bfloat16, torch.float32)}

    runs: dict[str, Callable[[], object]] = {f"transformers {n}": m.prefill for n, m in natives.items()}
    runs |= {arm: lambda arm=arm: ours.run(arm) for arm in ARMS}  # type: ignore[misc]
    timings = alternate(runs, args.repeat)
    best = min((n for n in timings if n.startswith("transformers")), key=lambda n: timings[n].wall)
    decode = {"ours": [], **{n: [] for n in natives}}  # type: ignore[var-annotated]
    for _ in range(3):
        decode["ours"].append(ours.decode_ms(args.decode_tokens))
        for name, native in natives.items():
            decode[name].append(native.decode_ms(args.decode_tokens))

    result = _result(llm, ours, timings, best, {k: median(v) for k, v in decode.items()})
    if args.profile:
        result["profile"] = {arm: breakdown(lambda arm=arm: ours.run(arm)) for arm in ARMS}  # type: ignore[misc]
    _print(timings, result)
    print(json.dumps(result))
    return 0


def _result(llm: LLM, ours: Ours, timings: dict[str, Timing], best: str, decode: dict[str, float]) -> dict[str, Any]:
    full = timings["full"].wall
    rate = gemm_rate(llm.built.dtype, llm.built.device, rows=2048, width=1024).gflops
    limit = prefill_limit(llm.engine.parts.adapter, len(ours.prompt.token_ids), rate)
    bandwidth = memory_bandwidth(llm.built.device)
    reports = {arm: ours.run(arm) for arm in ARMS}
    return {
        "prefill_vs_transformers": full / timings[best].wall,
        "cacheblend_ttft_ratio": timings["cacheblend:ratio=0.15"].wall / full,
        "epic_ttft_ratio": timings["epic:k=16"].wall / full,
        "question_ttft_ratio": timings["question:ratio=0.15"].wall / full,
        "naive_ttft_ratio": timings["naive"].wall / full,
        "decode_vs_transformers": decode["ours"] / min(v for k, v in decode.items() if k != "ours"),
        "limit_ratio": limit / full,
        "limit_seconds": limit,
        "decode_ms": decode,
        "decode_limit_ms": 1e3 * decode_limit(llm.engine.parts.adapter, len(ours.prompt.token_ids), bandwidth),
        "gemm_gflops": rate,
        "memory_gb_per_s": bandwidth,
        "prompt_tokens": len(ours.prompt.token_ids),
        "anchor": llm.config.anchor,
        "exact_tokens": {arm: r.cached_tokens for arm, r in reports.items()},
        "budget": {arm: r.budget for arm, r in reports.items()},
        "timings": {name: asdict(t) for name, t in timings.items()},
        "transformers": best,
        "dtype": str(llm.built.dtype).removeprefix("torch."),
        "threads": llm.built.threads,
        "attention": llm.built.attention,
        "model": llm.name,
        "hardware": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
    }


def _print(timings: dict[str, Timing], result: dict[str, Any]) -> None:
    table = Table(title=f"{result['prompt_tokens']} tokens, {result['threads']} threads, {result['dtype']}")
    for column in ("", "wall s", "CPU s", "of full", "spread"):
        table.add_column(column, justify="left" if not column else "right")
    full = timings["full"].wall
    for name, t in timings.items():
        spread = f"{min(t.all):.2f}-{max(t.all):.2f}"
        table.add_row(name, f"{t.wall:.3f}", f"{t.cpu:.2f}", f"{t.wall / full:.3f}", spread)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
