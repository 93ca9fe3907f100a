"""Sizes and spans of time as people read them."""

from __future__ import annotations

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_SPANS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def show_bytes(size: float) -> str:
    """``1.5 MiB``."""
    for unit in _SIZES:
        if size < 1024 or unit == _SIZES[-1]:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes any size")


def show_count(number: int, noun: str) -> str:
    """``1 record``, ``2,000 records``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_span(seconds: float) -> str:
    """``3 h``, in the largest unit of which there is a whole one; ``now`` below a second."""
    for unit, length in _SPANS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"
