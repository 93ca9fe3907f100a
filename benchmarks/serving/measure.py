"""What is asked of every peer, and the row that each answer becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.peers import Peer
from kvweave.bench.run import Options, make_workload, run
from kvweave.bench.summary import Spread
from kvweave.bench.texts import Document
from kvweave.bench.traces import Query
from kvweave.bench.workloads import TRACE, Shape, Workload, from_trace

Row = dict[str, Any]
WORKLOADS = ("fresh", "repeat", "permuted", "dropped", "chat")
_KNOWN_DOCUMENTS = ("permuted", "dropped", TRACE)
"""Their documents were there before the questions, as those of a retrieval index are."""
_CHAT_TURNS = 4
_KEPT = (
    "requests",
    "errors",
    "seconds",
    "prompt_tokens",
    "usage",
    "requests_per_second",
    "output_tokens_per_second",
    "server_cpu_seconds",
    "cpu_seconds_to_first_token",
)


@dataclass(frozen=True)
class Plan:
    """Sizes of the runs. Prompts of retrieval traces are as long as the trace makes them."""

    workloads: tuple[str, ...]
    concurrency: tuple[int, ...]
    requests: int
    documents: int
    document_tokens: int
    output_tokens: int
    queries: int
    trace: tuple[Query, ...] = ()
    """Empty: drawn by Zipf's law."""
    seed: int = 0


def measure(peer: Peer, url: str, plan: Plan, keep: Callable[[Row], None]) -> None:
    """One row a workload and concurrency, then one of the trace. Texts are the same for every peer, and new in every row."""
    seed = plan.seed
    for workload in plan.workloads:
        for concurrency in plan.concurrency:
            seed += 1
            least = concurrency * _CHAT_TURNS if workload == "chat" else 1  # a conversation has one request at a time
            options = _options(peer, url, plan, workload, max(plan.requests, least), seed, concurrency)
            keep(_row(peer, options, make_workload(options)))
    if plan.queries:
        options = _options(peer, url, plan, TRACE, plan.queries, plan.seed, 1)
        given = plan.trace[: plan.queries]
        keep(_row(peer, options, from_trace(given, plan.seed) if given else make_workload(options)))


def _options(peer: Peer, url: str, plan: Plan, workload: str, requests: int, seed: int, concurrency: int) -> Options:
    return Options(
        url=url,
        shape=Shape(requests, plan.documents, turns=_CHAT_TURNS, seed=seed),
        workload=workload,
        concurrency=concurrency,
        document_tokens=plan.document_tokens,
        output_tokens=plan.output_tokens,
        body=peer.body,
        precompute=peer.precompute and workload in _KNOWN_DOCUMENTS,
    )


def _row(peer: Peer, options: Options, workload: Workload) -> Row:
    result = run(options, workload)
    summary = result.summary
    times: Row = {
        "ttft_ms": _mean(summary.ttft_ms),
        "ttft_p95_ms": summary.ttft_ms.p95 if summary.ttft_ms else None,
        "tpot_ms": _mean(summary.tpot_ms),
        "ttft_ms_by_quarter": list(summary.ttft_ms_by_quarter),
    }
    counts = {name: getattr(summary, name) for name in _KEPT}
    ahead = {"precomputed": asdict(result.precomputed) if result.precomputed else None}
    return {"peer": peer.name, "workload": workload.name, "concurrency": options.concurrency} | times | counts | ahead


def speed_ups(found: Sequence[Row], baseline: str) -> dict[str, dict[str, float]]:
    """Of each peer over ``baseline`` in the trace: its mean TTFT divided by theirs, in the first and the last quarter."""
    quarters = {row["peer"]: row["ttft_ms_by_quarter"] for row in found if row["workload"] == TRACE}
    base = quarters.pop(baseline, None)
    if not base:
        return {}
    return {
        peer: {"first_quarter": base[0] / own[0], "last_quarter": base[-1] / own[-1]}
        for peer, own in quarters.items()
        if own
    }


def read_retrieval(path: Path) -> tuple[Query, ...]:
    """Queries of a JSONL file of objects with the texts each retrieved, ``retrieved_docs``, and perhaps its ``question``."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    numbers: dict[str, int] = {}
    return tuple(
        Query(
            tuple(Document(str(numbers.setdefault(text, len(numbers))), text) for text in record["retrieved_docs"]),
            record.get("question"),
        )
        for record in records
    )


def _mean(spread: Spread | None) -> float | None:
    return spread.mean if spread else None
