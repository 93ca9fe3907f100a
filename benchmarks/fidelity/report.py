"""Gates, rows and the table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.fidelity.arms import FULL, NOISE, Arm
from benchmarks.fidelity.measure import GateFailed, Measured
from kvweave.evaluation.metrics import paired_bootstrap, summarise

_EXACT = {"float32": 1e-3, "bfloat16": 0.02}
"""KL that rounding may make between two ways to compute the same; never below ten times the measured noise floor."""

Row = dict[str, Any]


def check_gates(measured: Sequence[Measured], dtype: str) -> str:
    """Refuse results if arms that recompute everything differ from full prefill by more than rounding."""
    worst: dict[Arm, float] = {}
    for record in measured:
        for arm, s in record.samples.items():
            if arm is NOISE or arm.full_ratio:
                worst[arm] = max(worst.get(arm, 0.0), s.kl_first, s.kl_answer)
    noise = worst.pop(NOISE, 0.0)
    worst.pop(FULL, None)
    limit = max(_EXACT[dtype], 10 * noise)
    for arm, kl in worst.items():
        if not kl <= limit:
            raise GateFailed(f"{arm.spec} must equal full prefill, its KL is {kl:.2e} (limit {limit:.2e})")
    shown = ", ".join(f"{arm.spec} {kl:.1e}" for arm, kl in worst.items()) or "none run"
    return (
        f"gates passed: largest KL of full prefill in other blocks {noise:.1e}; of arms that recompute everything: "
        f"{shown} (limit {limit:.1e}); charged budgets match the formula"
    )


def make_rows(data: str, measured: Sequence[Measured], arms: Sequence[Arm]) -> list[Row]:
    """One row per arm, over the records on which it was run."""
    rows = []
    for arm in (FULL, NOISE, *arms):
        pairs = [(m.samples[arm], m.samples.get(Arm("naive", arm.anchor))) for m in measured if arm in m.samples]
        if not pairs:
            continue
        samples = [s for s, _ in pairs]
        first, answer = summarise([s.kl_first for s in samples]), summarise([s.kl_answer for s in samples])
        row: Row = {
            "data": data,
            "spec": arm.spec,
            "technique": arm.technique,
            "options": arm.options if arm is not NOISE else {"other_blocks": True},
            "ratio": arm.ratio,
            "anchor": arm.anchor if arm is not NOISE else "",
            "n": len(samples),
            "budget": fmean(s.budget for s in samples),
            "kl_first": first["mean"],
            "kl_first_median": first["median"],
            "kl_first_p95": first["p95"],
            "top1": fmean(s.top1 for s in samples),
            "kl_answer": answer["mean"],
            "kl_answer_median": answer["median"],
        }
        for name, mean in (("score", fmean), ("f1_model_tokens", fmean), ("gold_nll", fmean), ("ttft_ratio", median)):
            values = [s.extra[name] for s in samples if name in s.extra]
            row[name] = mean(values) if values else None
        naive = [s for _, s in pairs if s is not None]
        if len(naive) == len(samples) and arm.technique != "naive":
            row |= _against([s.kl_first for s in samples], [s.kl_first for s in naive])
        rows.append(row)
    return rows


def _against(kl: Sequence[float], naive: Sequence[float]) -> Row:
    """Difference to naive reuse, and the share of its KL that is gone, with 95 % intervals over the same resamples."""
    mean, low, high = paired_bootstrap(kl, naive)
    row: Row = {"kl_first_minus_naive": [mean, low, high], "recovered": None}
    if fmean(naive) > 0:
        a, b = np.array(kl), np.array(naive)
        drawn = np.random.default_rng(0).integers(len(a), size=(10_000, len(a)))
        shares = 1 - a[drawn].sum(1) / np.maximum(b[drawn].sum(1), 1e-12)
        row["recovered"] = [1 - fmean(kl) / fmean(naive), *map(float, np.percentile(shares, [2.5, 97.5]))]
    return row


def print_table(console: Console, title: str, rows: Sequence[Row]) -> None:
    """The rows as people read them."""
    table = Table(title=title, title_justify="left")
    columns = ("arm", "anchor", "n", "budget", "KL first", "median", "p95", "top1", "KL answer", "median")
    for name in (*columns, "recovered [95 %]", "gold NLL", "score", "time"):
        table.add_column(name, justify="left" if name in ("arm", "anchor") else "right", no_wrap=True)
    for row in rows:
        recovered = row.get("recovered")
        table.add_row(
            row["spec"] + (", other blocks" if "other_blocks" in row["options"] else ""),
            row["anchor"],
            str(row["n"]),
            *(_number(row[k]) for k in ("budget", "kl_first", "kl_first_median", "kl_first_p95")),
            _number(row["top1"], 2),
            *(_number(row[k]) for k in ("kl_answer", "kl_answer_median")),
            "" if recovered is None else "{:.2f} [{:.2f}, {:.2f}]".format(*recovered),
            *(_number(row[k]) for k in ("gold_nll", "score")),
            _number(row["ttft_ratio"], 2),
        )
    console.print(table)


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
