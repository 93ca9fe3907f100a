"""Rows into numbers: percentiles, throughput, token classes, and whether anything decays."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvweave.bench.client import Row
from kvweave.bench.runner import Run

PERCENTILES = (50, 90, 95, 99)
_QUARTERS = 4


def spread(values: Iterable[float | None]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds; None where there is nothing."""
    known = sorted(1e3 * v for v in values if v is not None)
    found: dict[str, float | None] = {"mean": statistics.fmean(known) if known else None}
    for percent in PERCENTILES:
        found[f"p{percent}"] = percentile(known, percent) if known else None
    return found


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks, as numpy's default."""
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarise(run: Run) -> dict[str, Any]:
    """Everything a report shows, as JSON. Times in milliseconds unless named otherwise."""
    good = [row for row in run.rows if row.error is None]
    output = sum(row.output_tokens for row in good)
    usage: Counter[str] = Counter()
    for row in good:
        usage.update(row.usage)
    cpu = [row.cpu for row in good if row.cpu is not None]
    gaps = [b - a for row in good for a, b in zip(row.chunks, row.chunks[1:], strict=False)]
    return {
        "requests": len(run.rows),
        "errors": dict(Counter(row.error for row in run.rows if row.error is not None)),
        "seconds": run.seconds,
        "ttft_ms": spread(row.ttft for row in good),
        "tpot_ms": spread(row.tpot for row in good),
        "itl_ms": spread(gaps),
        "e2e_ms": spread(row.total for row in good),
        "requests_per_second": len(good) / run.seconds if run.seconds else 0.0,
        "prompt_tokens": sum(row.prompt_tokens for row in good),
        "output_tokens": output,
        "output_tokens_per_second": output / run.seconds if run.seconds else 0.0,
        "total_tokens_per_second": (output + sum(r.prompt_tokens for r in good)) / run.seconds if run.seconds else 0.0,
        "usage": dict(usage),
        "server_cpu_seconds": run.server_cpu,
        "cpu_seconds_to_first_token": statistics.median(cpu) if cpu else None,
        "ttft_ms_by_quarter": quarters(good),
    }


def quarters(rows: Sequence[Row]) -> list[float | None]:
    """Mean TTFT in milliseconds of each quarter of the run, in the order the requests were sent."""
    ordered = sorted(rows, key=lambda row: row.start)
    found: list[float | None] = []
    for i in range(_QUARTERS):
        part = ordered[i * len(ordered) // _QUARTERS : (i + 1) * len(ordered) // _QUARTERS]
        times = [1e3 * row.ttft for row in part if row.ttft is not None]
        found.append(statistics.fmean(times) if times else None)
    return found
