"""What is known of requests when they are done: their reports, totals, and what their loads say about the tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from kvweave.core.plan import Load
from kvweave.core.report import ReuseReport
from kvweave.core.spec import KVLayout
from kvweave.engine.profile import Profile
from kvweave.engine.sequence import Sequence


@dataclass
class Counters:
    """Totals since the engine was made."""

    tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens by class: exact, fused, recomputed, prefilled."""
    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(asked, ran, technique)"""
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(technique, reason)"""
    lost_loads: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(tier, reason): loads that failed, whose chunks were computed instead."""
    precomputed_tokens: int = 0

    def count(self, report: ReuseReport) -> None:
        self.tokens["exact"] += report.cached_tokens
        self.tokens["fused"] += report.fused_tokens
        self.tokens["recomputed"] += report.recomputed_tokens
        self.tokens["prefilled"] += report.prefilled_tokens
        self.requests[report.asked, report.ran, report.technique] += 1
        if report.fallback_reason is not None:
            self.fallbacks[report.technique, report.fallback_reason] += 1


def make_report(sequence: Sequence, layers: int) -> ReuseReport:
    """The report of a request that is done; raises ``IntegrityError`` if its token classes don't add up."""
    lookup = sequence.looked_up
    request = lookup.plan_request
    reusable = request.candidates.numel()
    times = sequence.times
    report = ReuseReport(
        asked=sequence.request.asked,
        ran=lookup.ran,
        technique=sequence.request.technique.name,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=request.num_cached,
        fused_tokens=reusable - sequence.recomputed,
        recomputed_tokens=sequence.recomputed,
        prefilled_tokens=sequence.num_prompt - request.num_cached - reusable,
        fallback_reason=lookup.fallback_reason,
        ratio=getattr(lookup.technique if request.hits else sequence.request.technique, "ratio", None),
        budget=sequence.charged / (layers * reusable) if reusable else 0.0,
        segments=lookup.segments,
        deviations=tuple(sequence.deviations),
        loads=sequence.tier_loads(),
        controller=lookup.decision,
        timings={
            "queue_ms": times["queue_ms"],
            "lookup_ms": times["lookup_ms"] - times["queue_ms"],
            "load_wait_ms": sequence.load_wait * 1e3,
            "prefill_ms": times["prefill_ms"] - times["lookup_ms"],
            "ttft_ms": times.get("ttft_ms", times["prefill_ms"]),
            "decode_ms": times["total_ms"] - times.get("ttft_ms", times["total_ms"]),
            "total_ms": times["total_ms"],
        },
    )
    report.check()
    return report


def note_loads(loads: Many[Load], profile: Profile, layout: KVLayout, threads: int, *, at_least: float = 0.0) -> None:
    """Tell the profile what each tier delivered, as the rate that ``threads`` I/O threads have together.

    ``at_least``: seconds that went by, where a load was given up.
    """
    per_layer = layout.bytes_per_token / layout.num_layers
    begun = [(load, load.reader) for load in loads if load.reader is not None and load.reader.jobs]
    for tier in {reader.tier for _, reader in begun}:
        mine = [(load, reader) for load, reader in begun if reader.tier == tier]
        size = sum(load.tokens.numel() * per_layer * (layout.num_layers - load.first_layer) for load, _ in mine)
        together = min(threads, sum(reader.jobs for _, reader in mine))
        seconds = sum(reader.load_seconds for _, reader in mine) / together
        profile.note_load(tier, int(size), max(at_least, seconds))
