"""The law of usage: every prompt token in one class, prompts add up, samples don't."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvweave.core.report import ReuseReport
from kvweave.protocol.usage import SUB_COUNTS, TOKEN_CLASSES, counts_json, usage_json


@st.composite
def reports(draw: st.DrawFn) -> ReuseReport:
    counts = {name: draw(st.integers(0, 1000)) for name in TOKEN_CLASSES}
    counts["prefilled_tokens"] += 1
    parts = {name: draw(st.integers(0, counts["prefilled_tokens"])) for name in SUB_COUNTS}
    report = ReuseReport("fused", "fused", "epic", prompt_tokens=sum(counts.values()), **counts, **parts)
    report.check()
    return report


@given(st.lists(reports(), min_size=1, max_size=4), st.integers(0, 100), st.integers(0, 100))
def test_classes_add_up(given_reports: list[ReuseReport], completion: int, operations: int) -> None:
    usage = usage_json(given_reports, completion, operations)
    details = usage["prompt_tokens_details"]
    assert usage["prompt_tokens"] == sum(r.prompt_tokens for r in given_reports) == sum(details[c] for c in TOKEN_CLASSES)
    assert usage["total_tokens"] == usage["prompt_tokens"] + completion
    assert set(details) == {*TOKEN_CLASSES, *SUB_COUNTS, "cache_ops"}
    assert details["cache_ops"] == operations
    assert all(details[name] <= details["prefilled_tokens"] for name in SUB_COUNTS)
    assert usage == {**usage, **counts_json(usage["prompt_tokens"], completion)}


def test_zeros_are_sent() -> None:
    details = usage_json([ReuseReport("off", "off", "full", 5, prefilled_tokens=5)], 0, 0)["prompt_tokens_details"]
    assert details.pop("prefilled_tokens") == 5
    assert len(details) == 8
    assert set(details.values()) == {0}
