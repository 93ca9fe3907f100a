"""What a command does about the write-behind to slower tiers before it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvweave.cli.output import LOG, Progress
from kvweave.cli.units import show_bytes

if TYPE_CHECKING:
    from kvweave.llm import LLM
    from kvweave.store.tiered import TierStats

_GLANCE = 0.2  # seconds between two looks at the queue


@dataclass(frozen=True)
class TierWrites:
    """What one tier took. ``failed``: records that didn't get there, by reason."""

    written: int
    bytes: int
    failed: dict[str, int]


def finish_writing(llm: LLM, progress: Progress) -> None:
    """Wait until everything is in the tiers. The medium's own deadlines bound each write."""
    if not _stats(llm):
        return
    with progress.status("Writing to the tiers") as report:
        while not llm.flush(_GLANCE):
            left = _stats(llm).values()
            records, size = sum(tier.queued_records for tier in left), sum(tier.queued_bytes for tier in left)
            if records:
                report(f"Writing to the tiers: {records} records, {show_bytes(size)} to go")


def close(llm: LLM, progress: Progress) -> dict[str, TierWrites]:
    """Write what is queued, then close; returns what each tier took, and warns of what it didn't.

    Interrupted, it leaves at once: a record that isn't written whole was never visible.
    """
    finish_writing(llm, progress)
    writes = {name: _writes(stats) for name, stats in _stats(llm).items()}
    llm.close()
    for name, tier in writes.items():
        if tier.failed:
            LOG.warning("Tier %s didn't take %d records (%s).", name, sum(tier.failed.values()), show_reasons(tier.failed))
    return writes


def show_reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason}: {number}" for reason, number in sorted(reasons.items()))


def _writes(stats: TierStats) -> TierWrites:
    refused = {str(reason): number for reason, number in stats.counters.puts.items() if reason != "ok" and number}
    for reason, number in stats.dropped.items():
        if number:
            refused[reason] = refused.get(reason, 0) + number
    return TierWrites(stats.counters.puts["ok"], stats.counters.bytes_written, refused)


def _stats(llm: LLM) -> dict[str, TierStats]:
    from kvweave.store.tiered import TieredStore

    store = llm.engine.parts.chunks.store
    return store.tier_stats() if isinstance(store, TieredStore) else {}
