"""A store's counters as Prometheus metrics: did it hit, did it help, is it broken.

A collector reads the counters when it is asked; nothing is counted twice and nothing is global. Labels are tiers, results
and reasons of closed lists; never tenants, documents or keys.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvweave.store.base import MISS_REASONS, ChunkStore, TierError
from kvweave.store.disk import DiskBlobs, DiskStats
from kvweave.store.guard import Guarded
from kvweave.store.medium import Medium
from kvweave.store.record_tier import BOUNDS, Times
from kvweave.store.tiered import TieredStore, TierStats

LOG = logging.getLogger("kvweave.store")
PREFIX = "kvweave_store_"
_PATIENCE = 1.0  # seconds a scrape waits for a medium to tell its state
REFUSALS = ("no_room", "quota", "read_only", "stale")
"""Reasons of ``Rejected``: refused without harm."""
DROPS = ("full", "stalled", "deleted", "closed", "error")
"""Why a record left the write queue unwritten."""
BREAKER_STATES = ("closed", "open", "half_open")
_ALIEN = ("fingerprint", "layout")
"""Records that are whole, but not of this model; what else is discarded is corrupt."""


def render(store: ChunkStore) -> str:
    """The metrics of a store in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    return generate_latest(registry).decode()


@dataclass
class _Families:
    """Metrics in the making, each created by its first sample."""

    made: dict[str, Metric] = field(default_factory=dict)

    def count(self, name: str, text: str, value: float, **labels: str) -> None:
        family = self.made.setdefault(name, CounterMetricFamily(PREFIX + name, text, labels=list(labels)))
        assert isinstance(family, CounterMetricFamily)
        family.add_metric(list(labels.values()), value)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        family = self.made.setdefault(name, GaugeMetricFamily(PREFIX + name, text, labels=list(labels)))
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(list(labels.values()), value)

    def times(self, name: str, text: str, times: Times, **labels: str) -> None:
        family = self.made.setdefault(name, HistogramMetricFamily(PREFIX + name, text, labels=list(labels)))
        assert isinstance(family, HistogramMetricFamily)
        bounds = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
        buckets = list(zip(bounds, map(float, itertools.accumulate(times.counts)), strict=True))
        family.add_metric(list(labels.values()), buckets, times.total)

    def reasons(
        self, name: str, text: str, counts: Mapping[str, int], known: Iterable[str], label: str = "result", **labels: str
    ) -> None:
        """One sample a reason that occurred; what isn't on the list of ``known`` ones is ``other``."""
        known = set(known)
        merged: dict[str, int] = {}
        for reason, number in counts.items():
            merged[reason if reason in known else "other"] = merged.get(reason if reason in known else "other", 0) + number
        for reason, number in sorted(merged.items()):
            self.count(name, text, number, **labels, **{label: reason})


class StoreCollector(Collector):
    """For a registry of your own: ``registry.register(StoreCollector(store))``."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        self._host(families)
        if isinstance(self._store, TieredStore):
            families.gauge("staging_bytes", "Memory held by loads on their way.", self._store.staging.used)
            families.gauge("staging_capacity_bytes", "Most of it.", self._store.staging.budget)
            families.gauge("deletes_pending", "Erasures a tier still has to do.", self._store.pending_erasures)
            stats = self._store.tier_stats()
            for tier in self._store.tiers:
                _tier(families, tier.name, stats[tier.name], self._store.io_threads)
                _medium(families, tier.medium)
        yield from families.made.values()

    def _host(self, out: _Families) -> None:
        stats = self._store.stats()
        tier = "host"
        results = {"hit": stats.hits, **stats.reasons}
        out.reasons("lookups", _LOOKUPS, results, ("hit", *MISS_REASONS), tier=tier)
        out.gauge("records", _RECORDS, stats.records, tier=tier)
        out.gauge("bytes", _BYTES, stats.bytes, tier=tier)
        out.gauge("capacity_bytes", _CAPACITY, stats.budget, tier=tier)
        out.count("evictions", _EVICTIONS, stats.evictions, tier=tier, reason="capacity")
        out.count(
            "refused", "Records for which host memory's budget, less its pins, is too small.", stats.refused, tier=tier
        )
        out.gauge("pins", _PINS, stats.pins, tier=tier)
        out.gauge("pinned_bytes", _PINNED_BYTES, stats.pinned_bytes, tier=tier)
        out.gauge("tier_up", _UP, 1, tier=tier)


def _tier(out: _Families, tier: str, stats: TierStats, threads: int) -> None:
    """What every tier behind host memory counts."""
    at = stats.counters
    lookups: dict[str, int] = {"hit": at.hits} | {str(reason): number for reason, number in at.misses.items()}
    out.reasons("lookups", _LOOKUPS, lookups, ("hit", *MISS_REASONS), tier=tier)
    out.count("lookup_tokens", "Tokens of the chunks looked up.", at.hit_tokens, tier=tier, result="hit")
    out.count("lookup_tokens", "Tokens of the chunks looked up.", at.missed_tokens, tier=tier, result="absent")
    for kind, loads in (("full", at.whole_loads), ("partial", at.loads - at.whole_loads)):
        known = ("ok", "dropped", *MISS_REASONS)
        out.reasons("loads", "Loads by result; full: all rows of all layers.", +loads, known, tier=tier, kind=kind)
    out.count("load_bytes", "Bytes read for loads.", at.bytes_read, tier=tier)
    out.count("load_rows", "Rows read for loads, those of every layer.", at.rows_read, tier=tier)
    out.times("load_seconds", "Time of a load, added up over I/O threads.", at.load_times, tier=tier)
    out.times("first_byte_seconds", "Time from a load's begin to the end of its first read.", at.first_times, tier=tier)
    if at.load_seconds > 0:
        out.gauge("bandwidth_bytes_per_second", _BANDWIDTH, threads * at.bytes_read / at.load_seconds, tier=tier)
    out.count("saved_prefill_seconds", "Prefill that loads made unnecessary, less their time.", at.saved_seconds, tier=tier)
    out.count("lost_seconds", "Time of loads beyond what prefill would have taken.", at.lost_seconds, tier=tier)
    out.reasons("puts", "Writes by result.", at.puts, ("ok", *REFUSALS, *MISS_REASONS), tier=tier)
    out.count("put_bytes", "Bytes written.", at.bytes_written, tier=tier)
    out.times("put_seconds", "Time of a write.", at.put_times, tier=tier)
    out.count("quota_rejected", "Writes refused for a tenant's quota.", at.puts["quota"], tier=tier)
    out.gauge("write_queue_records", "Records that wait to be written.", stats.queued_records, tier=tier)
    out.gauge("write_queue_bytes", "Their bytes.", stats.queued_bytes, tier=tier)
    out.reasons("write_dropped", "Records never written.", stats.dropped, DROPS, label="reason", tier=tier)
    for taken, result in ((True, "ok"), (False, "refused")):
        out.count("promotions", "Records copied up to host memory.", at.promotions[taken], tier=tier, result=result)
    damaged: dict[str, int] = {str(reason): number for reason, number in at.damaged.items()}
    alien = {reason: number for reason, number in damaged.items() if reason in _ALIEN}
    corrupt = {reason: number for reason, number in damaged.items() if reason not in _ALIEN}
    out.reasons("incompatible", "Records of another model or shape.", alien, _ALIEN, label="field", tier=tier)
    out.reasons("corrupt", "Damaged records that were taken away.", corrupt, MISS_REASONS, label="kind", tier=tier)
    out.count("discards_failed", "Damaged records the medium couldn't take away.", at.discards_failed, tier=tier)
    out.count("deadline", "Lookups and loads that came too late.", at.misses["deadline"] + at.loads["deadline"], tier=tier)


def _medium(out: _Families, medium: Medium) -> None:
    """What only this kind of medium knows. One that can't tell soon is down, and not an error of the scrape."""
    tier, blobs, up = medium.name, medium.blobs, not medium.pool.stuck
    if isinstance(blobs, Guarded):
        up = up and blobs.up
        state, entered = blobs.breaker.state, blobs.breaker.transitions
        out.gauge("breaker_open", "1 while the tier isn't asked.", state == "open", tier=tier)
        for name in BREAKER_STATES:
            out.count("breaker_transitions", "States entered.", entered.get(name, 0), tier=tier, state=name)
        blobs = blobs.blobs
    if isinstance(blobs, DiskBlobs):
        try:
            _disk(out, tier, medium.call(blobs.stats, time.monotonic() + _PATIENCE))
            out.gauge("read_only", "1 where the tier only serves.", blobs.read_only, tier=tier)
        except TierError as error:
            LOG.warning("tier %s can't tell its state: %s", tier, error)
            up = False
    out.gauge("tier_up", _UP, up, tier=tier)


def _disk(out: _Families, tier: str, stats: DiskStats) -> None:
    out.gauge("records", _RECORDS, stats.records, tier=tier)
    out.gauge("bytes", _BYTES, stats.bytes, tier=tier)
    if stats.capacity is not None:
        out.gauge("capacity_bytes", _CAPACITY, stats.capacity, tier=tier)
    out.gauge("free_bytes", "Of the file system.", stats.free, tier=tier)
    out.count("evictions", _EVICTIONS, stats.capacity_evictions, tier=tier, reason="capacity")
    out.count("evictions", _EVICTIONS, stats.quota_evictions, tier=tier, reason="quota")
    out.count("evicted_bytes", "Bytes that made room for others.", stats.evicted_bytes, tier=tier)
    out.gauge("pins", _PINS, stats.pins, tier=tier)
    out.gauge("pinned_bytes", _PINNED_BYTES, stats.pinned_bytes, tier=tier)
    out.count("put_duplicates", "Writes of what was there already; puts has them as ok.", stats.duplicates, tier=tier)
    out.count("errors", "Failed operations of the medium.", stats.errors, tier=tier)
    out.count("index_rebuilds", "How often the catalogue was found damaged.", stats.rebuilds, tier=tier)
    out.gauge("index_rebuild_seconds", "Time of the last count of all files.", stats.rebuild_seconds, tier=tier)


_LOOKUPS = "Lookups by result: hit, or why not."
_RECORDS = "Records held now."
_BYTES = "Bytes held now, with those being written."
_CAPACITY = "Most bytes it may hold."
_EVICTIONS = "Records that made room for others."
_PINS = "Records that are kept from eviction."
_PINNED_BYTES = "Their bytes."
_BANDWIDTH = "Bytes of all loads so far over the time of one I/O thread, times the threads."
_UP = "0 while the tier can't be used."
