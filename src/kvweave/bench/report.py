"""A report as one HTML file that needs nothing else: tables, and plots in plain SVG."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvweave.bench.client import Row

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 240, 60, 30
_COLOURS = ("#1f6feb", "#d1742f", "#2a9d5c", "#8250df", "#b3261e", "#57606a")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328 }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #d1d9e0 }
th:first-child, td:first-child { text-align: left } svg { max-width: 100%; height: auto } h2 { margin-top: 2rem }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 } th, td { border-color: #30363d } }
"""


def render(title: str, summary: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The whole page."""
    good = [row for row in rows if row.error is None and row.ttft is not None]
    start = [(row.start, 1e3 * (row.ttft or 0.0)) for row in good]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _table(summary),
        "<h2>Time to the first token</h2>",
        scatter(start, "seconds since the run began", "ms"),
        cumulative([y for _, y in start], "ms to the first token"),
    ]
    if usage := {name: n for name, n in summary["usage"].items() if name.endswith("_tokens") and n}:
        parts += ["<h2>Prompt tokens by class</h2>", bars(usage)]
    if summary["errors"]:
        parts += ["<h2>Errors</h2>", bars(summary["errors"])]
    data = html.escape(json.dumps(summary, indent=2))
    parts.append(f"<details><summary>All numbers</summary><pre>{data}</pre></details>")
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>' + (
        f"<style>{_STYLE}</style><body>{body}</body></html>"
    )


def _table(summary: Mapping[str, Any]) -> str:
    columns = ("mean", "p50", "p90", "p95", "p99")
    lines = ["<table><tr><th>ms</th>" + "".join(f"<th>{c}</th>" for c in columns) + "</tr>"]
    names = {"ttft_ms": "first token", "tpot_ms": "per output token", "itl_ms": "between chunks", "e2e_ms": "whole answer"}
    for key, name in names.items():
        cells = "".join(f"<td>{_number(summary[key][c])}</td>" for c in columns)
        lines.append(f"<tr><td>{name}</td>{cells}</tr>")
    lines.append("</table><table>")
    facts = ("requests", "seconds", "requests_per_second", "output_tokens_per_second", "server_cpu_seconds")
    lines += [f"<tr><td>{key.replace('_', ' ')}</td><td>{_number(summary[key])}</td></tr>" for key in facts]
    return "\n".join([*lines, "</table>"])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def scatter(points: Sequence[tuple[float, float]], x_name: str, y_name: str) -> str:
    marks = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_COLOURS[0]}"/>' for x, y in _scaled(points)]
    return _frame(points, marks, x_name, y_name)


def cumulative(values: Sequence[float], x_name: str) -> str:
    """Share of values up to each."""
    ordered = sorted(values)
    points = [(value, 100 * (i + 1) / len(ordered)) for i, value in enumerate(ordered)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in _scaled(points))
    marks = [f'<polyline points="{line}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>'] if points else []
    return _frame(points, marks, x_name, "% of requests")


def bars(counts: Mapping[str, float]) -> str:
    most = max(counts.values(), default=0) or 1
    rows, height = [], 26
    for i, (name, value) in enumerate(counts.items()):
        width = (_WIDTH - 320) * value / most
        y = i * height
        rows.append(f'<text x="210" y="{y + 17}" text-anchor="end" fill="currentColor">{html.escape(str(name))}</text>')
        rows.append(f'<rect x="220" y="{y + 4}" width="{width:.1f}" height="18" fill="{_COLOURS[i % len(_COLOURS)]}"/>')
        rows.append(f'<text x="{226 + width:.1f}" y="{y + 17}" fill="currentColor">{_number(value)}</text>')
    size = f'viewBox="0 0 {_WIDTH} {height * len(counts) or height}"'
    return f'<svg {size} width="{_WIDTH}" font-size="13" role="img">{"".join(rows)}</svg>'


def _scaled(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    wide, high = _limits(points)
    return [
        (_LEFT + (_WIDTH - _LEFT - 10) * x / wide, (_HEIGHT - _BOTTOM) - (_HEIGHT - _BOTTOM - 10) * y / high)
        for x, y in points
    ]


def _limits(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max((x for x, _ in points), default=1.0) or 1.0, max((y for _, y in points), default=1.0) or 1.0


def _frame(points: Sequence[tuple[float, float]], marks: Sequence[str], x_name: str, y_name: str) -> str:
    wide, high = _limits(points)
    floor = _HEIGHT - _BOTTOM
    axes = (
        f'<path d="M{_LEFT} 10 V{floor} H{_WIDTH - 10}" fill="none" stroke="currentColor"/>'
        f'<text x="{_LEFT - 6}" y="18" text-anchor="end" fill="currentColor">{high:,.0f}</text>'
        f'<text x="{_LEFT - 6}" y="{floor}" text-anchor="end" fill="currentColor">0</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 10}" text-anchor="end" fill="currentColor">{wide:,.1f}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 10}" fill="currentColor">{html.escape(x_name)}</text>'
        f'<text x="{_LEFT + 6}" y="22" fill="currentColor">{html.escape(y_name)}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" font-size="12" role="img">{axes}{"".join(marks)}</svg>'
