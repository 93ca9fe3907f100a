"""Numbers of a run: percentiles, quarters, and that failures stay out of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.bench.load import Sample
from kvweave.bench.streaming import Exchange
from kvweave.bench.summary import Spread, percentile, summarise


def sample(number: int, ttft_s: float, **fields: object) -> Sample:
    exchange = Exchange(float(number), ttft_s=ttft_s, e2e_s=ttft_s + 1, output_tokens=3, prompt_tokens=7)
    return Sample(number, 0, Exchange(**{**exchange.__dict__, **fields}))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_percentiles_are_ordered_and_within_the_values(seconds: list[float]) -> None:
    spread = Spread.of(seconds)
    assert spread is not None
    found = [spread.p50, spread.p90, spread.p95, spread.p99]
    assert found == sorted(found)
    assert 1e3 * min(seconds) - 1e-6 <= spread.mean <= 1e3 * max(seconds) + 1e-6


def test_a_decay_shows_in_the_quarters_whatever_order_the_answers_came_in() -> None:
    samples = [sample(n, 0.1 * (1 + n // 2)) for n in range(8)]
    assert summarise(samples[::-1]).ttft_ms_by_quarter == pytest.approx([100, 200, 300, 400])
    assert summarise(samples[:3]).ttft_ms_by_quarter == ()


def test_rates_count_answers_alone_over_all_the_time() -> None:
    failed = Sample(2, 0, Exchange(3.0, e2e_s=7.0, error="overloaded"))
    summary = summarise([sample(0, 0.5), sample(1, 1.5), failed], cpu_seconds=2.0)
    assert summary.seconds == pytest.approx(10.0)
    assert summary.requests_per_second == pytest.approx(0.2)
    assert summary.output_tokens_per_second == pytest.approx(0.6)
    assert summary.total_tokens_per_second == pytest.approx(2.0)
    assert (summary.requests, summary.completed, summary.errors) == (3, 2, {"overloaded": 1})
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.mean == pytest.approx(1000)
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.mean == pytest.approx(500)
    assert summary.server_cpu_seconds == 2.0


def test_nothing_sent_is_nothing_measured() -> None:
    summary = summarise([])
    assert (summary.requests, summary.ttft_ms, summary.requests_per_second) == (0, None, 0.0)
