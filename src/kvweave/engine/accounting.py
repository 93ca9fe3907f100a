"""What is known of requests when they are done: their reports, totals, and what their loads say about the tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import torch

from kvweave.core.plan import Load
from kvweave.core.report import TOKEN_KINDS, ReuseReport
from kvweave.core.spec import KVLayout
from kvweave.engine.profile import Profile
from kvweave.engine.sequence import Sequence, TokenClasses
from kvweave.errors import IntegrityError


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
    generated_tokens: int = 0
    preemptions: int = 0
    wasted: Counter[str] = field(default_factory=Counter)
    """Rows computed for nothing, by cause: preemption, abandoned_load, or the reason of a fallback half-way."""

    def count(self, report: ReuseReport) -> None:
        self.tokens["exact"] += report.cached_tokens
        self.tokens["fused"] += report.fused_tokens
        self.tokens["recomputed"] += report.recomputed_tokens
        self.tokens["prefilled"] += report.prefilled_tokens
        self.requests[report.asked, report.ran, report.technique] += 1
        if report.fallback_reason is not None:
            self.fallbacks[report.technique, report.fallback_reason] += 1


def classify(sequence: Sequence, published: int) -> TokenClasses:
    """How the prompt of a sequence whose prefill is done was come by."""
    request = sequence.looked_up.plan_request
    kinds = torch.full((request.num_tokens,), TOKEN_KINDS.index("exact"))
    kinds[request.computable] = TOKEN_KINDS.index("prefilled")
    kinds[request.candidates] = TOKEN_KINDS.index("fused")
    for orders in sequence.recomputed:
        kinds[orders] = TOKEN_KINDS.index("recomputed")
    return TokenClasses(kinds, request.resident, sequence.charged, published)


def make_report(sequence: Sequence, layers: int) -> ReuseReport:
    """The report of a request that is done; raises ``IntegrityError`` if its token classes don't add up."""
    lookup, classes = sequence.looked_up, sequence.classes
    if classes is None:
        raise IntegrityError("a request is done whose prefill isn't")
    tokens = classes.count()
    reusable = tokens["fused"] + tokens["recomputed"]
    report = ReuseReport(
        asked=sequence.request.asked,
        ran=lookup.ran,
        technique=sequence.request.technique.name,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=tokens["exact"],
        fused_tokens=tokens["fused"],
        recomputed_tokens=tokens["recomputed"],
        prefilled_tokens=tokens["prefilled"],
        cache_write_tokens=classes.published,
        prefix_tokens=classes.prefix,
        fallback_reason=None if sequence.request.asked == "auto" else lookup.fallback_reason,  # the server's own choice
        ratio=getattr(lookup.technique if reusable else sequence.request.technique, "ratio", None),
        budget=classes.charged / (layers * reusable) if reusable else 0.0,
        segments=tuple(replace(s, tokens=classes.count(s.start, s.stop)) for s in lookup.segments),
        deviations=tuple(sequence.deviations),
        loads=sequence.tier_loads(),
        controller=lookup.decision,
        timings=_timings(sequence),
    )
    report.check()
    return report


def _timings(sequence: Sequence) -> dict[str, float]:
    times = sequence.times
    decode = times["total_ms"] - times.get("ttft_ms", times["total_ms"])
    produced = len(sequence.output_ids) - 1  # the first token comes with the prefill
    return {
        "queue_ms": times["queue_ms"],
        "lookup_ms": times["lookup_ms"] - times["queue_ms"],
        "load_ms": sum(load.load_ms for load in sequence.tier_loads().values()),
        "load_wait_ms": sequence.load_wait * 1e3,
        "prefill_ms": times["prefill_ms"] - times["lookup_ms"],
        "ttft_ms": times.get("ttft_ms", times["prefill_ms"]),
        "decode_ms": decode,
        "total_ms": times["total_ms"],
        "tokens_per_second": 1e3 * produced / decode if produced > 0 and decode > 0 else 0.0,
    }


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
