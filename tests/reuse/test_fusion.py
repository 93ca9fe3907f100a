"""Chunk fusion: what must be exact, what must not see the future, what is computed and what is read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.attention import BACKENDS, BlockedAttention
from kvweave.core.keys import ChunkKey
from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.engine.executor import Executor
from kvweave.errors import InvalidOption
from kvweave.index.chunks import Chunking
from kvweave.kv.pool import KVPool
from kvweave.reuse.base import ChunkHit, FallBack, PlanRequest
from kvweave.reuse.cacheblend import CacheBlend
from kvweave.reuse.random_rows import Random
from kvweave.store.base import ChunkRecord
from tests.lab import BOS, Lab, close, doc, prompt_of, standard
from tests.matrix import adapter

FUSED = ["naive", "epic:k=2", "random:ratio=0.3", "cacheblend:ratio=0.3", "cacheblend:ratio=0", "question:ratio=0.3"]


def same(a: list[Tensor], b: list[Tensor], stop: int, start: int = 0) -> bool:
    return all(close(x[:, start:stop], y[:, start:stop]) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("technique", FUSED)
def test_chunk_behind_its_anchor_is_exact_at_every_ratio(technique: str) -> None:
    """T2: nothing of the first chunk is approximate, in any layer, and it is counted as exact."""
    lab = Lab()
    first, second = doc(40, 1), doc(30, 2)
    lab.precompute(first, second)
    prompt = prompt_of([BOS], ("doc", first), ("doc", second), doc(5, 3))
    full = lab.fresh().run(prompt, "full")
    result = lab.run(prompt, technique)
    assert same(result.keys, full.keys, 41)
    assert same(result.values, full.values, 41)
    assert result.report.cached_tokens == 40
    assert not same(result.keys, full.keys, 71, start=41)  # the second one is not


def test_record_made_without_its_anchor_differs() -> None:
    """T2, negative control: the anchor is what makes it exact."""
    first = doc(40, 1)
    with_bos, without = Lab(), Lab()
    with_bos.precompute(first)
    without.precompute(first, anchor=())
    a = next(iter(with_bos.store.host._records.values()))
    b = next(iter(without.store.host._records.values()))
    assert close(a.keys[0], b.keys[0])  # layer 0 depends on the token alone
    assert not close(a.keys[1], b.keys[1])
    assert a.key != b.key


@dataclass
class FixedSource:
    """Stored KV that doesn't change with the prompt; counts what is read."""

    layout: KVLayout
    tokens: int
    reads: list[int] = field(default_factory=list)

    def read(self, tokens: Tensor, first_layer: int, ticket: int, timeout: float) -> FixedReader:
        return FixedReader(self, tokens)


@dataclass
class FixedReader:
    source: FixedSource
    tokens: Tensor
    tier: str = "host"
    bytes_read: int = 0
    load_seconds: float = 0.0
    jobs: int = 0

    @property
    def arrived(self) -> bool:
        return True

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        self.source.reads.append(layer)
        spec = self.source.layout.layers[layer]
        generator = torch.Generator().manual_seed(layer)
        shape = (spec.num_kv_heads, self.source.tokens, spec.key_dim)
        keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        return keys[:, self.tokens], values[:, self.tokens]

    def close(self) -> None:
        """Nothing is held."""


def fixed_request(ids: Tensor, layout: KVLayout, **changes: Any) -> PlanRequest:
    """Two chunks at 4..24 and 24..48 of 60 tokens."""
    hits = (ChunkHit(4, 24, FixedSource(layout, 20), 1), ChunkHit(24, 48, FixedSource(layout, 24), 1))
    return PlanRequest(ids, torch.arange(100, 160), layout, 512, hits=hits, **changes)


def run_plans(request: PlanRequest, technique: Any, attention: Any = None) -> tuple[KVPool, list[Any]]:
    model = adapter("llama")
    pool = KVPool(model.layout, 200, model.device)
    executor = Executor(model, pool, attention or BlockedAttention())
    results = []
    for plan in technique.plan(request):
        results += executor.run([plan])
    return pool, results


class TriangleAttention(BlockedAttention):
    """What released code does: a bottom-right triangle over scattered rows."""

    def prepare(self, views: Any, pool: KVPool) -> Any:
        wrong = []
        for view in views:
            rows, size = view.stop - view.start, view.context.size
            wrong.append(replace(view, visible=torch.arange(size - rows + 1, size + 1)))
        return super().prepare(wrong, pool)


@pytest.mark.parametrize("changed", [10, 30, 50, 58])
@pytest.mark.parametrize("backend", [*BACKENDS, "triangle"])
def test_no_row_sees_a_later_token(backend: str, changed: int) -> None:
    """T3: change one token; rows in front of it keep every bit. The triangle mask must fail this."""
    layout = adapter("llama").layout
    ids = torch.tensor(doc(60, 5))
    other = ids.clone()
    other[changed] = (other[changed] + 1) % 120 + 3
    technique = Random(ratio=0.3, full_layers=2)
    attention = TriangleAttention() if backend == "triangle" else BACKENDS[backend]()
    pools = [run_plans(fixed_request(x, layout), technique, attention)[0] for x in (ids, other)]
    before = slice(100, 100 + changed)
    same_bits = all(torch.equal(a[:, before], b[:, before]) for a, b in zip(pools[0].keys, pools[1].keys, strict=True))
    right = backend != "triangle" or changed >= 48  # behind the last unselected token even a triangle is right
    assert same_bits == right
    assert not torch.equal(pools[0].keys[0][:, 100 + changed], pools[1].keys[0][:, 100 + changed])


def test_triangle_shows_as_many_tokens_too_many_as_are_unselected_behind() -> None:
    """T3: at r = 1 the two masks agree, so only a smaller ratio can find the error."""
    rows = torch.tensor([0, 1, 2, 7, 9])
    triangle = torch.arange(10 - 5 + 1, 11)
    unselected_behind = torch.tensor([sum(1 for j in range(int(r) + 1, 10) if j not in rows) for r in rows])
    assert torch.equal(triangle - (rows + 1), unselected_behind)


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.7])
def test_layers_up_to_the_check_are_exact(ratio: float) -> None:
    """T4: all rows run there, so records are read from the check layer on, and layer 0 never deviates."""
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(*documents)
    full = lab.fresh().run(prompt, "full")
    result = lab.run(prompt, f"cacheblend:ratio={ratio},check_layer=2")
    n = len(prompt.token_ids)
    assert same(result.keys[:3] + result.values[:3], full.keys[:3] + full.values[:3], n)
    assert not same(result.keys[3:], full.keys[3:], n)
    with pytest.raises(InvalidOption, match="check_layer=0"):
        CacheBlend(check_layer=0)


def test_layer_zero_of_a_moved_chunk_is_what_computing_it_there_gives() -> None:
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(*documents)
    naive, full = lab.run(prompt, "naive"), lab.fresh().run(prompt, "full")
    # A matrix product's last bits depend on how many rows it has, so what was computed elsewhere is equal within those ...
    assert close(naive.keys[0], full.keys[0], atol=1e-5)
    assert close(naive.values[0], full.values[0], atol=1e-5)
    # ... but the way from the record to the pool is one rotation, bit for bit.
    record, at = lab.store.host._records[first_key(lab, documents[0])], torch.arange(3, 27)
    assert torch.equal(naive.keys[0][:, at], lab.model.rotary.at(at).rotate_keys(0, record.keys[0]))
    assert torch.equal(naive.values[0][:, at], record.values[0])


def first_key(lab: Lab, document: list[int]) -> ChunkKey:
    return lab.engine.parts.chunks.pieces(document, (BOS,))[0].identity.key


def test_records_are_not_read_below_the_check_layer() -> None:
    """T13."""
    layout = adapter("llama").layout
    request = fixed_request(torch.tensor(doc(60, 5)), layout)
    run_plans(request, CacheBlend(ratio=0.2, check_layer=2))
    for hit in request.hits:
        assert isinstance(hit.source, FixedSource)
        assert hit.source.reads == [2, 3]


def test_epic_does_not_load_what_it_recomputes() -> None:
    from kvweave.reuse.epic import Epic

    layout = adapter("llama").layout
    request = fixed_request(torch.tensor(doc(60, 5)), layout)
    (plan,) = Epic(k=3).plan(request)
    loaded = torch.cat([load.positions for load in plan.loads])
    assert not torch.isin(plan.positions, loaded).any()
    assert sorted([*plan.positions.tolist(), *loaded.tolist()]) == list(range(60))


@pytest.mark.parametrize("technique", ["single", "gradual"])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5])
def test_charged_rows_are_the_rows_that_ran(technique: str, ratio: float) -> None:
    """T5, T13: sizes as predicted from N and r alone, nested from layer to layer."""
    layout = KVLayout(tuple([LayerSpec(4, 2, 16, 16)] * 16), torch.float32)
    request = fixed_request(torch.arange(60), layout)
    made = CacheBlend(ratio=ratio, schedule=technique)  # type: ignore[arg-type]
    (plan,) = made.plan(request)
    heads = request.heads(made.head).numel()
    kept = [max(heads, torch.ceil(torch.tensor(r * 44, dtype=torch.float64)).int().item()) for _, r in made.checks(layout)]
    assert [s.keep for s in plan.steps] == kept  # type: ignore[union-attr]
    assert kept == sorted(kept, reverse=True)
    layers = [layer for layer, _ in made.checks(layout)]
    assert layers == ([1] if technique == "single" or 1.5 * ratio > 1 else [1, 2, 4])


def test_gradual_spends_what_single_spends() -> None:
    """The mean ratio over the layers behind the first check is r."""
    layout = KVLayout(tuple([LayerSpec(4, 2, 16, 16)] * 32), torch.float32)
    checks = CacheBlend(ratio=0.2, schedule="gradual").checks(layout)
    edges = [c for c, _ in checks] + [31]
    spent = sum(r * (b - a) for (a, r), b in zip(checks, edges[1:], strict=True))
    assert spent / (31 - checks[0][0]) == pytest.approx(0.2)
    assert [layer for layer, _ in checks] == [1, 4, 8]


@given(ratio=st.floats(0, 1), seed=st.integers(0, 5), schedule=st.sampled_from(["single", "gradual"]))
@settings(max_examples=25, deadline=None)
def test_rows_nest_and_two_runs_agree(ratio: float, seed: int, schedule: str) -> None:
    """T5."""
    model = adapter("llama")
    made = CacheBlend(ratio=ratio, schedule=schedule, check_layer=1)  # type: ignore[arg-type]
    request = fixed_request(torch.tensor(doc(60, seed)), model.layout)
    (pool_a, a), (pool_b, b) = run_plans(request, made), run_plans(request, made)
    assert a[0].rows_per_layer == b[0].rows_per_layer
    assert torch.equal(a[0].logits, b[0].logits)
    assert all(torch.equal(x, y) for x, y in zip(pool_a.keys, pool_b.keys, strict=True))
    rows = a[0].rows_per_layer
    assert all(x >= y for x, y in itertools.pairwise(rows))
    assert rows[0] == 60
    assert rows[-1] == 16 + max(8, -(-ratio * 44 // 1))


def test_heads_as_long_as_the_chunks_give_the_full_prefill() -> None:
    """T6: chosen rows decide, not the nominal ratio."""
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(*documents)
    result = lab.run(prompt, "cacheblend:ratio=0.1,head=64,check_layer=1", keep=3)
    assert close(result.logits, lab.native(prompt)[-3:])
    assert result.report.fused_tokens == 0


def test_order_of_documents_changes_no_record() -> None:
    """T7: A, B, C and C, B, A read the same bytes and leave them as they were."""
    lab = Lab()
    a, b, c = doc(40, 1), doc(24, 2), doc(70, 3)
    lab.precompute(a, b, c)
    keys = list(lab.store.host._records)
    before = {k: [t.clone() for t in r.keys + r.values] for k, r in lab.store.host._records.items()}
    for order in ((a, b, c), (c, b, a), (b, b, a)):
        prompt = prompt_of([BOS, 7], *(("doc", d) for d in order), doc(6, 4))
        for technique in ("cacheblend:ratio=0.3", "epic", "cacheblend:ratio=1"):
            result = lab.run(prompt, technique)
            if technique.endswith("=1"):
                assert close(result.logits, lab.native(prompt)[-1:])
            lab.forget_prefixes()
    other = Lab()
    other.precompute(c, a, b)
    assert set(lab.store.host._records) == set(other.store.host._records) == set(keys)
    for key, tensors in before.items():
        now = lab.store.host._records[key]
        assert all(torch.equal(x, y) for x, y in zip(now.keys + now.values, tensors, strict=True))
        theirs = other.store.host._records[key]
        assert all(torch.equal(x, y) for x, y in zip(theirs.keys + theirs.values, tensors, strict=True))


@pytest.mark.parametrize("missing", [[0], [1], [2], [0, 2], [0, 1]])
def test_holes_never_hide_later_hits(missing: list[int]) -> None:
    """T8: a hole is computed in every layer; at r < 1 the result is that of the slow kernels."""
    documents, prompt = standard()
    results = []
    for attention in ("blocked", "reference"):
        lab = Lab(attention=attention)
        lab.precompute(*(d for i, d in enumerate(documents) if i not in missing))
        result = lab.run(prompt, "cacheblend:ratio=0.3")
        hits = [s.result for s in result.report.segments]
        assert hits == ["miss" if i in missing else "hit" for i in range(3)]
        assert all((s.reason == "never_seen") == (s.result == "miss") for s in result.report.segments)
        assert result.report.prefilled_tokens == 10 + sum(len(documents[i]) for i in missing)
        results.append(result.logits)
        lab.forget_prefixes()
        assert close(lab.run(prompt, "cacheblend:ratio=1").logits, lab.native(prompt)[-1:])
        lab.forget_prefixes()
        assert close(lab.run(prompt, "question:ratio=1").logits, lab.native(prompt)[-1:])
    assert close(results[0], results[1])


@pytest.mark.parametrize("technique", ["epic:k=2", "cacheblend:ratio=0.3", "question:ratio=0.4", "naive"])
@pytest.mark.parametrize("place", ["before", "between", "end"])
def test_question_anywhere_and_prompts_that_end_in_a_chunk(technique: str, place: str) -> None:
    """T9: the last token of the prompt is always a row."""
    a, b, question = doc(40, 1), doc(30, 2), doc(6, 9)
    parts: dict[str, list[Any]] = {
        "before": [[BOS], question, ("doc", a), ("doc", b)],
        "between": [[BOS, 4], ("doc", a), question, ("doc", b)],
        "end": [[BOS, 4], ("doc", a), ("doc", b), question],
    }
    prompt = prompt_of(*parts[place])
    lab = Lab()
    lab.precompute(a, b)
    result = lab.run(prompt, technique)
    assert result.logits.shape[0] == 1
    assert torch.isfinite(result.logits).all()
    assert result.report.fused_tokens > 0
    lab.forget_prefixes()
    name = technique.partition(":")[0]
    if name != "naive":
        again = lab.run(prompt, f"{name}:ratio=1")
        assert close(again.logits, lab.native(prompt)[-1:])


def test_long_prompts_run_in_blocks() -> None:
    """T22: each block chooses its own share and attends to the finished ones."""
    documents = [doc(60, i) for i in range(4)]
    prompt = prompt_of([BOS, 3], *(("doc", d) for d in documents), doc(8, 9))
    lab = Lab(max_step_rows=100, prefill_rows=100)
    lab.precompute(*documents)
    assert close(lab.run(prompt, "cacheblend:ratio=1").logits, lab.native(prompt)[-1:])
    lab.forget_prefixes()
    fast = lab.run(prompt, "cacheblend:ratio=0.3")
    slow = lab.fresh(attention="reference")
    slow.precompute(*documents)
    assert close(fast.logits, slow.run(prompt, "cacheblend:ratio=0.3").logits)
    assert len(fast.report.deviations) == 3  # one check in each of three blocks
    whole = lab.fresh(max_step_rows=512)
    whole.precompute(*documents)
    assert not close(fast.logits, whole.run(prompt, "cacheblend:ratio=0.3").logits)  # another choice


@pytest.mark.parametrize("technique", ["epic:k=3", "cacheblend:ratio=0.3,check_layer=1", "question:ratio=0.4"])
@pytest.mark.parametrize("case", ["prefix ends inside a document", "pieces behind two anchors"])
def test_a_piece_whose_front_is_exact_is_a_border(technique: str, case: str) -> None:
    """The pieces in front are exact, this one isn't: its head is where the text in front changed."""
    long = doc(90, 1)
    lab = Lab()
    name = technique.partition(":")[0]
    if case.startswith("prefix"):
        lab.precompute(long)
        lab.run(prompt_of([BOS, 6], long[:40]), "prefix")
    else:
        lab.anchors = ((BOS, 6), (BOS,))
        lab.precompute(long, anchor=(BOS, 6))
        first = lab.engine.parts.chunks.pieces(long, (BOS, 6))[0].identity.key
        lab.store.remove([k for k in lab.store.host._records if k != first])
        lab.precompute(long)
    prompt = prompt_of([BOS, 6], ("doc", long), doc(5, 3))
    result = lab.run(prompt, technique)
    assert result.report.cached_tokens > 0
    assert result.report.recomputed_tokens > 0
    lab.forget_prefixes()
    assert close(lab.run(prompt, f"{name}:ratio=1").logits, lab.native(prompt)[-1:])


@pytest.mark.parametrize("technique", ["random:ratio=0,full_layers=2", "cacheblend:ratio=0,head=0"])
def test_blocks_of_which_nothing_goes_on(technique: str) -> None:
    """A block may end in the middle of the model; what it loads in later layers must still arrive."""
    documents = [doc(60, i) for i in range(4)]
    prompt = prompt_of([BOS, 3], *(("doc", d) for d in documents), doc(8, 9))
    whole, cut = Lab(), Lab(max_step_rows=30, prefill_rows=30)
    for lab in (whole, cut):
        lab.precompute(*documents)
    a, b = whole.run(prompt, technique), cut.run(prompt, technique)
    assert close(a.logits, b.logits)
    assert a.report.recomputed_tokens == b.report.recomputed_tokens == 0


@pytest.mark.parametrize("start", [0, 1, 130, 400])
@pytest.mark.parametrize("family", ["llama-yarn", "smollm3", "cohere2", "glm4", "phi3", "gpt_oss"])
def test_chunks_at_any_position_and_twice(family: str, start: int) -> None:
    """T15: far positions, position 0, and one record in two places of a prompt."""
    chunk = doc(40, 1)
    lab = Lab(family, chunking=Chunking(size=64, min_tokens=8))
    lab.precompute(chunk, anchor=())
    lab.anchors = ((),)
    text = [doc(start, 2)] if start else []
    prompt = prompt_of(*text, ("doc", chunk), doc(3, 3), ("doc", chunk), doc(4, 4))
    assert close(lab.run(prompt, "epic:ratio=1").logits, lab.native(prompt)[-1:])
    lab.forget_prefixes()
    naive = lab.run(prompt, "naive")
    full = lab.fresh().run(prompt, "full")
    assert close(naive.keys[0], full.keys[0])
    assert [s.result for s in naive.report.segments] == ["hit", "hit"]


def test_a_model_without_a_usable_check_layer_falls_back() -> None:
    """The window hides what a check would have to see: no fusion, counted."""
    layout = KVLayout(tuple([LayerSpec(4, 2, 16, 16, window=8)] * 8), torch.float32)
    with pytest.raises(FallBack):
        next(iter(CacheBlend().plan(fixed_request(torch.arange(60), layout))))
    lab = Lab("gemma2")
    documents, prompt = standard()
    lab.precompute(*documents)
    result = lab.run(prompt, "cacheblend:ratio=0.2", keep=2)
    assert result.report.ran == "exact"
    assert result.report.fallback_reason == "unsupported_model"
    assert close(result.logits, lab.native(prompt)[-2:])
    assert lab.engine.counters.fallbacks["cacheblend", "unsupported_model"] == 1


def test_deviation_that_is_not_finite_restarts_exactly() -> None:
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(*documents)
    records = lab.store.host._records
    key, record = next(iter(records.items()))
    broken = tuple(torch.full_like(k, float("nan")) for k in record.keys)
    records[key] = ChunkRecord(record.identity, broken, record.values)
    result = lab.run(prompt, "cacheblend:ratio=0.2", keep=2)
    assert result.report.fallback_reason == "high_deviation"
    assert result.report.ran == "exact"
    assert close(result.logits, lab.native(prompt)[-2:])
