"""The server's Prometheus metrics: vLLM's names, so that its routers and dashboards work, and kvweave's own.

Counts come from the engine and the store when they are asked; times are watched request by request. Labels are of closed
lists, never chosen by callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvweave.core.prompt import Document
from kvweave.engine.engine import Engine
from kvweave.server.state import Answered, Exchange
from kvweave.store.base import MISS_REASONS, ChunkStore, MissReason
from kvweave.store.metrics import StoreCollector
from kvweave.store.tiered import TieredStore

OPERATIONS = ("segment", "option")
"""What ``usage`` counts as ``cache_ops``: marks and documents, and every other key of ``cache``."""
GATE_STATES = ("closed", "open", "forced")
_KINDS = ("exact", "fused", "recomputed", "repositioned", "dropped", "prefilled")
_BLOCK = 16  # tokens: what vLLM's block size would be
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOTAL = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Seconds: vLLM's buckets, which its dashboards expect."""


class ServerMetrics:
    """The metrics of one application, in a registry of its own. Thread-safe.

    ``gates`` tells the state of each technique's quality gate, by name.
    """

    def __init__(self, model_name: str, engine: Engine, gates: Callable[[], Mapping[str, str]] = dict) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}
        self.registry.register(_EngineCollector(engine, labels, gates))
        self.registry.register(StoreCollector(engine.parts.chunks.store))
        self._times = _Times.of(self.registry, labels)
        self._operations = Counter("kvweave_cache_ops", "Cache operations received.", ["op"], registry=self.registry)
        for op in OPERATIONS:
            self._operations.labels(op)
        self._errors = Counter(
            "kvweave_request_errors", "Requests answered with an error.", ["code"], registry=self.registry
        )

    def finished(self, exchange: Exchange, answered: Answered) -> None:
        """A request was answered."""
        self._times.note(answered)
        segments = len(_segments(exchange))
        self._operations.labels("segment").inc(segments)
        self._operations.labels("option").inc(max(0, exchange.operations - segments))

    def failed(self, code: str) -> None:
        """A request was answered with an error; ``code`` is of the tree in ``kvweave.errors``."""
        self._errors.labels(code).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


@dataclass(frozen=True)
class _Times:
    """Histograms in seconds, and answers by how they ended; vLLM's names."""

    first_token: Histogram
    between: Histogram
    total: Histogram
    queue: Histogram
    prefill: Histogram
    success: Mapping[str, Counter]

    @classmethod
    def of(cls, registry: CollectorRegistry, labels: Mapping[str, str]) -> _Times:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}_seconds", text, list(labels), buckets=buckets, registry=registry)
            return made.labels(**labels)

        success = Counter(
            "vllm:request_success", "Answers by how they ended.", [*labels, "finished_reason"], registry=registry
        )
        return cls(
            first_token=histogram("time_to_first_token", "From arrival to the first token.", _TTFT),
            between=histogram("inter_token_latency", "From one token to the next.", _GAP),
            total=histogram("e2e_request_latency", "From arrival to the last token.", _TOTAL),
            queue=histogram("request_queue_time", "Waiting to be started.", _TOTAL),
            prefill=histogram("request_prefill_time", "Computing the prompt.", _TOTAL),
            success={reason: success.labels(**labels, finished_reason=reason) for reason in ("stop", "length")},
        )

    def note(self, answered: Answered) -> None:
        self.first_token.observe(answered.first_token)
        self.total.observe(answered.total)
        for interval in answered.intervals:
            self.between.observe(interval)
        for output in answered.outputs:
            self.success[output.finish_reason].inc()
        timings = answered.outputs[0].reuse.timings  # the samples share a prompt
        self.queue.observe(timings["queue_ms"] / 1e3)
        self.prefill.observe(timings["prefill_ms"] / 1e3)


class _EngineCollector(Collector):
    """Reads the engine's counters when it is asked."""

    def __init__(self, engine: Engine, labels: Mapping[str, str], gates: Callable[[], Mapping[str, str]]) -> None:
        self._engine = engine
        self._labels = labels
        self._gates = gates

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._tokens()
        yield from self._reuse()
        yield _chunk_lookups(self._engine.parts.chunks.store)

    def _requests(self) -> Iterator[Metric]:
        scheduler, counters = self._engine.scheduler, self._engine.counters
        slots, used = self._engine.parts.pool.num_slots, pool_usage(self._engine)
        yield self._gauge("num_requests_running", "Requests that run.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Requests that wait to be started.", len(scheduler.waiting))
        yield self._count("num_preemptions", "Running requests that had to give way.", counters.preemptions)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV pool that running requests use, 0 to 1.", used)
        config = {**self._labels, "block_size": str(_BLOCK), "num_gpu_blocks": str(slots // _BLOCK)}
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV pool, in blocks.", labels=list(config))
        info.add_metric(list(config.values()), 1)
        yield info

    def _tokens(self) -> Iterator[Metric]:
        counters = self._engine.counters
        tokens = dict(counters.tokens)
        prompts = sum(tokens.values())
        yield self._count("prompt_tokens", "Prompt tokens.", prompts)
        yield self._count("generation_tokens", "Answer tokens.", counters.generated_tokens)
        yield self._count("prefix_cache_queries", "Prompt tokens that could have been found.", prompts)
        yield self._count("prefix_cache_hits", "Those whose exact KV was found.", tokens.get("exact", 0))
        kinds = CounterMetricFamily("kvweave_tokens", "Prompt tokens by how their KV was come by.", labels=["kind"])
        for kind in _KINDS:
            kinds.add_metric([kind], tokens.get(kind, 0))
        yield kinds
        wasted = CounterMetricFamily("kvweave_wasted_tokens", "Rows computed for nothing.", labels=["cause"])
        for cause, count in dict(counters.wasted).items():
            wasted.add_metric([cause], count)
        yield wasted
        yield CounterMetricFamily(
            "kvweave_precompute_tokens", "Tokens computed ahead, to be reused.", counters.precomputed_tokens
        )

    def _reuse(self) -> Iterator[Metric]:
        counters = self._engine.counters
        requests = CounterMetricFamily(
            "kvweave_requests", "Requests by what they asked for and what ran.", labels=["asked", "ran", "technique"]
        )
        for asked, count in dict(counters.requests).items():
            requests.add_metric(list(asked), count)
        yield requests
        fallbacks = CounterMetricFamily(
            "kvweave_fallbacks", "Requests that ran exact instead.", labels=["technique", "reason"]
        )
        for why, count in dict(counters.fallbacks).items():
            fallbacks.add_metric(list(why), count)
        yield fallbacks
        gates = GaugeMetricFamily("kvweave_gate_state", "0 closed, 1 open, 2 forced.", labels=["technique"])
        for technique, state in self._gates().items():
            gates.add_metric([technique], GATE_STATES.index(state))
        yield gates

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def pool_usage(engine: Engine) -> float:
    """Share of the KV pool that running requests use. What only the prefix tree holds can be had at any time."""
    allocator = engine.allocator
    owners = allocator.owners(torch.arange(allocator.num_slots))
    unused = engine.tree.num_tokens - int((owners > 1).sum())
    return max(0, int((owners > 0).sum()) - max(0, unused)) / allocator.num_slots


def _segments(exchange: Exchange) -> list[Document]:
    """As they arrived, whether or not the template let them be told apart."""
    conversation = exchange.conversation
    if conversation is None:
        return [span.document for span in exchange.prompt.spans if span.document is not None]
    parts = (part for m in conversation.messages if not isinstance(m.content, str) for part in m.content or ())
    return [part for part in (*parts, *conversation.documents) if isinstance(part, Document)]


def _chunk_lookups(store: ChunkStore) -> Metric:
    family = CounterMetricFamily("kvweave_chunk_lookups", "Chunks looked up.", labels=["tier", "result", "reason"])
    stats = store.stats()
    found = {"host": (stats.hits, stats.reasons)}
    if isinstance(store, TieredStore):
        found |= {tier: (s.counters.hits, _by_name(s.counters.misses)) for tier, s in store.tier_stats().items()}
    for tier, (hits, misses) in found.items():
        family.add_metric([tier, "hit", ""], hits)
        for reason, count in misses.items():
            family.add_metric([tier, "miss", reason if reason in MISS_REASONS else "other"], count)
    return family


def _by_name(counts: Mapping[MissReason, int]) -> dict[str, int]:
    return {str(reason): count for reason, count in counts.items()}
