"""What a run came to: percentiles, throughput, token classes, errors, and the TTFT of each quarter of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvweave.bench.load import Sample
from kvweave.bench.streaming import Exchange

_QUARTERS = 4


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Spread | None:
        """None where there are no values."""
        ordered = sorted(1e3 * value for value in seconds if value is not None)
        if not ordered:
            return None
        return cls(fmean(ordered), *(percentile(ordered, percent) for percent in (50, 90, 95, 99)))


@dataclass(frozen=True)
class Summary:
    """Of the measured requests, without warm-up. Failed requests count in ``requests`` and ``errors`` alone."""

    requests: int
    errors: dict[str, int]
    seconds: float
    """From the first byte of the first request to the end of the last answer."""
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    """Tokens of prompts, cached ones too, and answers."""
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    ttft_ms_by_quarter: tuple[float, ...]
    """Means of the first, second, third and last quarter of the requests, as sent; empty for fewer than four."""
    prompt_tokens: int
    output_tokens: int
    usage: dict[str, int]
    """Sums of ``usage.prompt_tokens_details``, under the names that the server uses."""
    server_cpu_seconds: float | None
    """Of the server and its children, all the while; None if it isn't on this machine."""
    cpu_seconds_to_first_token: float | None
    """Median over the requests; None unless they ran one at a time."""

    @property
    def completed(self) -> int:
        return self.requests - sum(self.errors.values())


def summarise(samples: Sequence[Sample], cpu_seconds: float | None = None) -> Summary:
    """``cpu_seconds``: of the server while these requests ran, where known."""
    sent = sorted((sample.exchange for sample in samples), key=lambda one: one.sent_at)
    done = [one for one in sent if one.error is None]
    seconds = max((one.sent_at + one.e2e_s for one in sent), default=0.0) - (sent[0].sent_at if sent else 0.0)
    output, prompt = sum(one.output_tokens for one in done), sum(one.prompt_tokens or 0 for one in done)
    usage: Counter[str] = Counter()
    for one in done:
        usage.update(one.details)
    rate = 1 / seconds if seconds else 0.0
    to_first = [one.cpu_to_first_s for one in done if one.cpu_to_first_s is not None]
    return Summary(
        requests=len(sent),
        errors=dict(Counter(one.error for one in sent if one.error is not None)),
        seconds=seconds,
        requests_per_second=len(done) * rate,
        output_tokens_per_second=output * rate,
        total_tokens_per_second=(output + prompt) * rate,
        ttft_ms=Spread.of(one.ttft_s for one in done),
        tpot_ms=Spread.of(one.tpot_s for one in done),
        itl_ms=Spread.of(gap for one in done for gap in one.gaps_s),
        e2e_ms=Spread.of(one.e2e_s for one in done),
        ttft_ms_by_quarter=_by_quarter(done),
        prompt_tokens=prompt,
        output_tokens=output,
        usage=dict(usage),
        server_cpu_seconds=cpu_seconds,
        cpu_seconds_to_first_token=median(to_first) if to_first else None,
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy's default."""
    place = percent / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _by_quarter(done: Sequence[Exchange]) -> tuple[float, ...]:
    ttft = [1e3 * one.ttft_s for one in done if one.ttft_s is not None]
    if len(ttft) < _QUARTERS:
        return ()
    edges = [len(ttft) * n // _QUARTERS for n in range(_QUARTERS + 1)]
    return tuple(fmean(ttft[start:end]) for start, end in itertools.pairwise(edges))
