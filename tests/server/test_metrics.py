"""Everything that should be exported is, the numbers are those of the requests, and the dashboard asks for what exists."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document, TokenPrompt
from kvweave.core.report import Output
from kvweave.server.metrics import ServerMetrics
from kvweave.server.state import Answered, Exchange
from tests.engine.test_tiered_loads import TieredLab
from tests.lab import Lab, doc, prompt_of, standard

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/kvweave.json"
VLLM = {
    *("num_requests_running", "num_requests_waiting", "num_preemptions", "kv_cache_usage_perc", "prefix_cache_queries"),
    *("prefix_cache_hits", "prompt_tokens", "generation_tokens", "time_to_first_token_seconds", "cache_config_info"),
    *("inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_success"),
}
OWN = {
    *("tokens", "wasted_tokens", "precompute_tokens", "requests", "fallbacks", "cache_ops", "request_errors"),
    *("chunk_lookups", "gate_state"),
}
STORE = {"lookups", "records", "bytes", "capacity_bytes", "evictions", "tier_up", "staging_bytes", "pins", "pinned_bytes"}
Sample = tuple[str, frozenset[tuple[str, str]]]


def samples(metrics: ServerMetrics) -> dict[Sample, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(found: dict[Sample, float], name: str, **labels: str) -> float:
    """Sum over all samples that have these labels."""
    return sum(v for (n, have), v in found.items() if n == name and set(labels.items()) <= have)


def served(lab: Lab) -> ServerMetrics:
    return ServerMetrics("m", lab.engine, lambda: {"cacheblend": "open", "epic": "closed"})


def exchange(prompt: TokenPrompt, **options: object) -> Exchange:
    ids = {"id": "chatcmpl-1", "request_id": "r", "endpoint": "chat", "tenant": "t", "salt": "", "asked": "exact"}
    return Exchange(**{**ids, "prompt": prompt, **options})  # type: ignore[arg-type]


def answer(lab: Lab, prompt: TokenPrompt, technique: str, max_tokens: int = 0) -> Output:
    sequence = lab.add(prompt, technique, max_tokens=max_tokens)
    (output,) = lab.engine.run([sequence])
    return output


def test_every_metric_that_is_due_is_exported_before_the_first_request() -> None:
    text = served(Lab()).exposition().decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    due = {f"vllm:{n}" for n in VLLM} | {f"kvweave_{n}" for n in OWN} | {f"kvweave_store_{n}" for n in STORE}
    assert due - names == set()


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["full", "prefix", "naive", "cacheblend:ratio=0.5"]), st.integers(0, 3), st.integers(0, 4)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15, deadline=None)
@given(REQUESTS, st.sets(st.integers(0, 2)))
def test_sums_over_requests_are_the_metrics(requests: list[tuple[str, int, int]], cached: set[int]) -> None:
    lab = Lab()
    metrics = served(lab)
    lab.precompute(*(standard()[0][i] for i in cached))
    before = samples(metrics)
    kinds: Counter[str] = Counter()
    total = generated = 0
    for technique, seed, length in requests:
        prompt = standard(seed)[1]
        output = answer(lab, prompt, technique, length)
        metrics.finished(exchange(prompt), Answered((output,), 0.01, (0.02,) * max(0, length - 1), 0.5))
        report = output.reuse
        kinds.update(exact=report.cached_tokens, fused=report.fused_tokens)
        kinds.update(recomputed=report.recomputed_tokens, prefilled=report.prefilled_tokens)
        total, generated = total + report.prompt_tokens, generated + len(output.token_ids)
    after = samples(metrics)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    for kind in ("exact", "fused", "recomputed", "prefilled", "repositioned", "dropped"):
        assert grown("kvweave_tokens_total", kind=kind) == kinds[kind]
    assert grown("kvweave_tokens_total") == grown("vllm:prompt_tokens_total") == total
    assert grown("vllm:generation_tokens_total") == generated
    assert grown("vllm:prefix_cache_hits_total") == kinds["exact"]
    assert grown("kvweave_requests_total") == grown("vllm:e2e_request_latency_seconds_count") == len(requests)
    assert grown("vllm:request_success_total", finished_reason="length") == len(requests)
    assert grown("kvweave_precompute_tokens_total") == 0
    assert value(after, "kvweave_precompute_tokens_total") == lab.engine.counters.precomputed_tokens
    assert grown("vllm:inter_token_latency_seconds_count") == sum(max(0, length - 1) for _, _, length in requests)


def test_fused_tokens_are_no_hits_of_the_prefix_cache() -> None:
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(*documents)
    metrics = served(lab)
    assert answer(lab, prompt, "naive").reuse.fused_tokens > 0
    assert value(samples(metrics), "vllm:prefix_cache_hits_total") == 0
    answer(lab, prompt, "prefix")  # what stands in front of the first document
    assert value(samples(metrics), "vllm:prefix_cache_hits_total") == 3


def test_cached_prefixes_are_no_load() -> None:
    lab = Lab(slots=256)
    metrics = served(lab)
    prompt = prompt_of(doc(100, 1))
    running = lab.add(prompt, "prefix", max_tokens=20)
    lab.engine.step()
    busy = value(samples(metrics), "vllm:kv_cache_usage_perc")
    lab.engine.run([running])
    assert busy >= 100 / 256
    assert lab.engine.tree.num_tokens > 100
    found = samples(metrics)
    assert value(found, "vllm:kv_cache_usage_perc") == 0
    assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="16", model_name="m", engine="0") == 1


def test_a_missed_chunk_says_why() -> None:
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(documents[0])
    metrics = served(lab)
    answer(lab, prompt, "naive")
    found = samples(metrics)
    assert value(found, "kvweave_chunk_lookups_total", tier="host", result="hit") == 1
    assert value(found, "kvweave_chunk_lookups_total", tier="host", result="miss", reason="absent") == 3
    assert value(found, "kvweave_gate_state", technique="cacheblend") == 1


def test_operations_are_segments_and_options() -> None:
    lab = Lab()
    metrics = served(lab)
    _, prompt = standard()
    output = answer(lab, prompt, "prefix")
    done = Answered((output,), 0.1, (), 0.1)
    marked = Conversation((Message("user", ["a", Document("b")]), Message("user", "c")), documents=(Document("d"),))
    metrics.finished(exchange(prompt, conversation=marked, operations=3), done)
    assert value(samples(metrics), "kvweave_cache_ops_total", op="segment") == 2
    assert value(samples(metrics), "kvweave_cache_ops_total", op="option") == 1
    metrics.finished(exchange(prompt, operations=5), done)  # three documents of a prompt without messages
    assert value(samples(metrics), "kvweave_cache_ops_total") == 8


def test_errors_by_code() -> None:
    metrics = served(Lab())
    metrics.failed("overloaded")
    metrics.failed("overloaded")
    assert value(samples(metrics), "kvweave_request_errors_total", code="overloaded") == 2


def test_two_applications_in_one_process_do_not_share_metrics() -> None:
    lab = Lab()
    one, other = served(lab), served(lab)
    one.failed("x")
    assert value(samples(other), "kvweave_request_errors_total") == 0


@pytest.fixture(scope="module")
def exported() -> set[str]:
    families = text_string_to_metric_families(served(TieredLab()).exposition().decode())
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {family.name + s for family in families for s in suffixes.get(family.type, ("",))}


def test_the_dashboard_asks_for_what_exists(exported: set[str]) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"(?:vllm:|kvweave_)\w+", query)}
    assert len(queries) >= len(panels) > 10
    assert named - exported == set()
    assert len({panel["id"] for panel in panels}) == len(panels)
