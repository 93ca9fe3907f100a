"""The numbers of a run as rows of text, for the terminal and for the HTML report."""

from __future__ import annotations

from kvweave.bench.run import Result
from kvweave.bench.summary import Summary

Rows = list[tuple[str, ...]]
_COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def facts(result: Result) -> Rows:
    """What ran, and how much of it."""
    options, summary, target = result.options, result.summary, result.target
    load = f"{options.concurrency} at a time" if options.rate is None else f"{options.rate:g} requests/s, Poisson"
    rows: Rows = [
        ("server", f"{target.base}, model {target.model}"),
        ("workload", f"{options.workload}, seed {options.shape.seed}, {load}"),
        ("documents", "content parts with cache marks" if target.marked else "plain text"),
        ("requests", f"{summary.requests:,} in {summary.seconds:.1f} s, {summary.completed:,} answered"),
        ("requests/s", f"{summary.requests_per_second:,.2f}"),
        ("output tokens/s", f"{summary.output_tokens_per_second:,.1f}"),
        ("tokens/s, prompts too", f"{summary.total_tokens_per_second:,.1f}"),
    ]
    if summary.ttft_ms_by_quarter:
        rows.append(("TTFT by quarter, ms", " · ".join(f"{value:,.1f}" for value in summary.ttft_ms_by_quarter)))
    if summary.server_cpu_seconds is not None:
        rows.append(("server CPU, s", f"{summary.server_cpu_seconds:,.2f}"))
    if summary.cpu_seconds_to_first_token is not None:
        rows.append(("... until a first token", f"{summary.cpu_seconds_to_first_token:.3f}"))
    if result.precomputed is not None:
        rows.append(("precomputed", f"{result.precomputed.documents:,} documents in {result.precomputed.seconds:.1f} s"))
    return rows


def latency_rows(summary: Summary) -> tuple[tuple[str, ...], Rows]:
    """Columns and rows."""
    named = (
        ("time to first token", summary.ttft_ms),
        ("time per output token", summary.tpot_ms),
        ("between chunks", summary.itl_ms),
        ("end to end", summary.e2e_ms),
    )
    rows = [(name, *(f"{getattr(spread, c):,.1f}" for c in _COLUMNS)) for name, spread in named if spread is not None]
    return ("ms", *_COLUMNS), rows


def token_rows(summary: Summary) -> tuple[tuple[str, ...], Rows]:
    """Tokens of all prompts and answers, and the classes of prompt tokens as the server counts them."""
    total = summary.prompt_tokens
    rows: Rows = [("prompts", f"{total:,}", ""), ("answers", f"{summary.output_tokens:,}", "")]
    rows += [(name, f"{count:,}", f"{count / total:.1%}" if total else "") for name, count in summary.usage.items()]
    return ("", "tokens", "of the prompts"), rows
