"""The report of a run as one HTML file: numbers and plain SVG, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from kvweave.bench.run import Result
from kvweave.bench.tables import facts, latency_rows, token_rows

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 240, 64, 32
_TICKS = 4
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .25rem .9rem .25rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; } thead { border-bottom: 1px solid #999; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #555; }
figure { margin: 1.5rem 0; } figcaption { color: #555; }
"""


def page(result: Result) -> str:
    """The whole document. Names and texts from outside are escaped."""
    rows = list(result.rows())
    done = [row for row in rows if row["error"] is None]
    sent, ttft = [row["sent_s"] for row in done], [row["ttft_s"] for row in done]
    shares = [(rank + 1) / len(done) for rank in range(len(done))]
    quarters = result.summary.ttft_ms_by_quarter
    figures = [
        _figure("TTFT (s) of each request, by when it was sent (s)", _points(sent, ttft)),
        _figure("Share of requests whose TTFT is at most so many seconds", _line(sorted(ttft), shares)),
        _figure("Mean TTFT (ms) of the quarters of the run", _bars([f"quarter {n + 1}" for n in range(4)], quarters)),
    ]
    title = f"{result.target.model}: {result.options.workload}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _table(("", ""), facts(result)),
        "<h2>Latency</h2>",
        _table(*latency_rows(result.summary)),
        *figures,
        "<h2>Tokens</h2>",
        _table(*token_rows(result.summary)),
    ]
    if result.summary.errors:
        body += ["<h2>Errors</h2>", _table(("code", "requests"), [(c, str(n)) for c, n in result.summary.errors.items()])]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns) if any(columns) else ""
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _figure(caption: str, drawing: str) -> str:
    if not drawing:
        return ""
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(caption)}"'
    return f"<figure><svg {box}>{drawing}</svg><figcaption>{escape(caption)}</figcaption></figure>"


class _Plane:
    """Maps values to the drawing area; both axes start at 0."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._x, self._y = max(xs) or 1.0, max(ys) or 1.0

    def at(self, x: float, y: float) -> tuple[str, str]:
        across = _LEFT + (_WIDTH - _LEFT - 16) * x / self._x
        down = (_HEIGHT - _BOTTOM) - (_HEIGHT - _BOTTOM - 12) * y / self._y
        return f"{across:.1f}", f"{down:.1f}"

    def axes(self, with_x: bool = True) -> str:
        marks = []
        for tick in range(_TICKS + 1):
            x, bottom = self.at(self._x * tick / _TICKS, 0)
            left, y = self.at(0, self._y * tick / _TICKS)
            marks.append(f'<line x1="{left}" x2="{_WIDTH - 16}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            marks.append(f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{self._y * tick / _TICKS:.3g}</text>')
            if with_x:
                label = f"{self._x * tick / _TICKS:.3g}"
                marks.append(f'<text x="{x}" y="{bottom}" dy="18" text-anchor="middle">{label}</text>')
        return "".join(marks)


def _points(xs: Sequence[float], ys: Sequence[float]) -> str:
    if not xs:
        return ""
    plane = _Plane(xs, ys)
    places = (plane.at(x, y) for x, y in zip(xs, ys, strict=True))
    return plane.axes() + "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="#1f6feb" opacity=".6"/>' for x, y in places)


def _line(xs: Sequence[float], ys: Sequence[float]) -> str:
    if not xs:
        return ""
    plane = _Plane(xs, ys)
    path = " ".join(",".join(plane.at(x, y)) for x, y in zip(xs, ys, strict=True))
    return f'{plane.axes()}<polyline points="{path}" fill="none" stroke="#1f6feb" stroke-width="2"/>'


def _bars(names: Sequence[str], values: Sequence[float]) -> str:
    if not values:
        return ""
    plane = _Plane([len(values)], values)
    parts: list[Any] = [plane.axes(with_x=False)]
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        (left, top), (right, bottom) = plane.at(number + 0.2, value), plane.at(number + 0.8, 0)
        width, height = float(right) - float(left), float(bottom) - float(top)
        parts.append(f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{height:.1f}" fill="#1f6feb"/>')
        middle, _ = plane.at(number + 0.5, 0)
        parts.append(f'<text x="{middle}" y="{bottom}" dy="18" text-anchor="middle">{escape(name)}: {value:.3g}</text>')
    return "".join(parts)
