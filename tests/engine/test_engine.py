"""The engine: exact prefixes, sharing, tenants, batches, failures. Slot accounting is checked after every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from kvweave.core.plan import RequestPlan
from kvweave.core.sampling import SamplingParams
from kvweave.engine.sequence import Request
from kvweave.errors import ContextLengthExceeded, InvalidRequest, PlanError, PromptExceedsPool
from kvweave.index.chunks import Chunking
from kvweave.reuse.base import PlanRequest, static_plan
from kvweave.reuse.registry import make_technique
from kvweave.store.host import HostStore
from kvweave.store.tiered import TieredStore
from tests.lab import BOS, Lab, close, doc, prompt_of, standard


def test_prefix_is_reused_exactly_and_counted() -> None:
    lab = Lab()
    system = [BOS, *doc(50, 1)]
    lab.run(prompt_of(system, doc(5, 2)), "prefix")
    prompt = prompt_of(system, doc(9, 3))
    result = lab.run(prompt, "prefix", keep=3)
    assert result.report.cached_tokens == 51
    assert close(result.logits, lab.native(prompt)[-3:])
    again = lab.run(prompt, "prefix")
    assert again.report.cached_tokens == 59  # the last token is always computed
    assert lab.run(prompt, "full").report.cached_tokens == 0


def test_answers_extend_the_prefix_of_the_next_turn() -> None:
    lab = Lab()
    first = lab.run(prompt_of([BOS], doc(20, 1)), "prefix", max_tokens=6)
    turn = prompt_of([BOS], doc(20, 1), list(first.token_ids), doc(4, 2))
    second = lab.run(turn, "prefix", keep=2)
    assert second.report.cached_tokens == 21 + 5  # the last answer token was sampled, never computed
    assert close(second.logits, lab.native(turn)[-2:])


@pytest.mark.parametrize("technique", ["epic:k=2", "cacheblend:ratio=0.3", "question:ratio=0.3"])
def test_fusion_behind_an_exact_prefix_equals_fusion_with_it_computed(technique: str) -> None:
    """T10."""
    documents, prompt = standard()
    cold = Lab()
    cold.precompute(*documents)
    expected = cold.run(prompt, technique)
    warm = cold.fresh()
    warm.precompute(*documents)
    warm.run(prompt_of([BOS, 5, 9], doc(12, 77)), "prefix")
    result = warm.run(prompt, technique)
    assert result.report.cached_tokens == 3
    assert close(result.logits, expected.logits)


def test_only_exact_tokens_enter_the_tree() -> None:
    """T12: fused KV is nobody's prefix; the same ids asked exactly are computed."""
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(*documents)
    result = lab.run(prompt, "epic:k=2", max_tokens=4)
    assert result.report.fused_tokens > 0
    assert lab.engine.tree.num_tokens == 3  # the text in front of the first fused chunk
    exact = lab.run(prompt, "prefix", keep=2)
    assert exact.report.cached_tokens == 3
    assert close(exact.logits, lab.native(prompt)[-2:])


def test_many_requests_with_eviction_equal_their_isolated_runs() -> None:
    """T11: recurring chunks in random order, small chunk cache, small pool."""
    chooser = random.Random(0)
    documents = [doc(40, i) for i in range(6)]
    whole = Chunking(size=64, min_tokens=8)  # one piece a document, so that each is a hit or a miss
    record = Lab(chunking=whole)
    record.precompute(documents[0])
    one = record.store.stats().bytes
    lab = Lab(cache_bytes=int(3.5 * one), slots=260, chunking=whole)
    for i in range(50):
        picked = chooser.sample(documents, 3)
        prompt = prompt_of([BOS, 3 + i % 4], *(("doc", d) for d in picked), doc(5, i % 7))
        technique = chooser.choice(["epic:k=3", "cacheblend:ratio=0.3", "naive", "prefix"])
        lab.precompute(*picked[: chooser.randint(0, 3)])
        lab.forget_prefixes()  # what is exact changes what is left to choose from
        result = lab.run(prompt, technique)
        hits = [i for i, s in enumerate(result.report.segments) if s.result == "hit"]
        alone = Lab(chunking=whole)
        alone.precompute(*(picked[i] for i in hits))
        assert close(result.logits, alone.run(prompt, technique).logits)
    assert lab.store.stats().evictions > 10


def test_requests_wait_for_slots_and_all_finish() -> None:
    lab = Lab(slots=100)
    waiting = [lab.add(prompt_of([BOS], doc(40, i)), "full", max_tokens=8) for i in range(6)]
    lab.engine.step()
    assert len(lab.engine.scheduler.running) == 2
    outputs = lab.engine.run(waiting)
    assert [len(o.token_ids) for o in outputs] == [8] * 6
    lab.engine.check_integrity()
    assert lab.engine.allocator.num_free == 100


def test_prefixes_nobody_uses_make_room() -> None:
    lab = Lab(slots=100)
    for i in range(4):
        lab.run(prompt_of([BOS, 3 + i], doc(60, i)), "prefix")
    assert 0 < lab.engine.tree.num_tokens <= 100


def test_what_can_never_run_is_refused_before_anything_is_done() -> None:
    lab = Lab(slots=64)
    with pytest.raises(PromptExceedsPool, match="kv_pool"):
        lab.add(prompt_of(doc(65, 1)), "full")
    with pytest.raises(ContextLengthExceeded, match="600"):
        Lab().add(prompt_of(doc(600, 1)), "full")
    assert lab.engine.scheduler.idle


def test_abort_frees_everything_at_any_point() -> None:
    lab = Lab(slots=200)
    for steps in range(5):
        sequences = [lab.add(prompt_of([BOS], doc(50, i)), "prefix", max_tokens=20) for i in range(4)]
        for _ in range(steps):
            lab.engine.step()
        for sequence in sequences:
            lab.engine.abort(sequence)
            lab.engine.check_integrity()
    assert lab.engine.scheduler.idle


@dataclass(frozen=True)
class WritesToSharedSlots:
    name: ClassVar[str] = "rogue"
    reuse: ClassVar[Any] = "exact"

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        yield static_plan(replace(request, resident=0), request.candidates)


def test_writing_to_a_shared_slot_is_refused() -> None:
    """T14."""
    lab = Lab()
    prompt = prompt_of([BOS], doc(30, 1))
    lab.run(prompt, "prefix")
    with pytest.raises(PlanError, match="shared slot"):
        lab.run(prompt, WritesToSharedSlots())
    lab.engine.check_integrity()
    assert lab.engine.scheduler.idle


@dataclass(frozen=True)
class Fails:
    name: ClassVar[str] = "fails"
    reuse: ClassVar[Any] = "exact"
    late: bool = False

    def plan(self, request: PlanRequest) -> Iterator[RequestPlan]:
        if self.late:
            yield request.compile(request.computable[:4], loads=(), logits=False)
        raise ZeroDivisionError("a bug in a plugin")


@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_a_technique_ends_that_request_alone(late: bool) -> None:
    lab = Lab()
    good = lab.add(prompt_of([BOS], doc(30, 1)), "full", max_tokens=4)
    bad = lab.add(prompt_of([BOS], doc(30, 2)), Fails(late), max_tokens=4)
    last = lab.add(prompt_of([BOS], doc(30, 3)), "full", max_tokens=4)
    assert [len(o.token_ids) for o in lab.engine.run([good, last])] == [4, 4]
    with pytest.raises(ZeroDivisionError, match="plugin"):
        lab.engine.run([bad])
    lab.engine.check_integrity()
    assert lab.engine.scheduler.idle
    assert lab.engine.allocator.num_free == 1024


def test_two_requests_fusing_one_chunk_do_not_see_each_other() -> None:
    """T14: fused chunks have private slots."""
    documents, prompt = standard()
    other = prompt_of([BOS, 99, 98, 97], *(("doc", d) for d in reversed(documents)), doc(7, 50))
    lab = Lab()
    lab.precompute(*documents)
    pair = [lab.add(p, "cacheblend:ratio=0.3", max_tokens=3) for p in (prompt, other)]
    lab.engine.run(pair)
    for p, sequence in zip((prompt, other), pair, strict=True):
        alone = lab.fresh()
        alone.precompute(*documents)
        assert close(torch.cat(sequence.prompt_logits), alone.run(p, "cacheblend:ratio=0.3", max_tokens=3).logits)


def test_no_hit_across_tenants() -> None:
    """T20: the other tenant misses and the same tenant hits, in the chunk cache and in the prefix tree."""
    documents, prompt = standard()
    store = TieredStore(HostStore(2**30))
    mine, theirs = Lab(tenant="a"), Lab(tenant="b")
    for lab in (mine, theirs):
        lab.engine.reconfigure(chunks=replace(lab.engine.parts.chunks, store=store))
    mine.precompute(*documents)
    assert {s.result for s in mine.run(prompt, "naive").report.segments} == {"hit"}
    assert {s.result for s in theirs.run(prompt, "naive").report.segments} == {"miss"}
    both = Lab()
    for tenant, cached in (("a", 0), ("b", 0), ("a", len(prompt.token_ids) - 1)):
        chunks = replace(both.engine.parts.chunks, tenant=tenant)
        both.engine.reconfigure(chunks=chunks)
        assert both.run(prompt, "prefix").report.cached_tokens == cached


def test_every_prompt_token_is_in_one_class() -> None:
    documents, prompt = standard()
    lab = Lab(min_reuse_tokens=90)
    lab.precompute(*documents)
    for technique in ("full", "prefix", "naive", "raw", "epic", "random", "cacheblend", "question"):
        report = lab.run(prompt, technique).report
        report.check()
        assert report.prompt_tokens == len(prompt.token_ids)
        lab.forget_prefixes()
    totals = lab.engine.counters.tokens
    assert sum(totals.values()) == 8 * len(prompt.token_ids)


def test_too_little_to_fuse_runs_exactly() -> None:
    documents, prompt = standard()
    lab = Lab(min_reuse_tokens=256)
    lab.precompute(*documents)
    result = lab.run(prompt, "naive", keep=2)
    assert (result.report.ran, result.report.fallback_reason) == ("exact", "below_min_reuse")
    assert close(result.logits, lab.native(prompt)[-2:])
    missed = Lab().run(prompt, "naive").report
    assert (missed.ran, missed.fallback_reason) == ("exact", "no_chunk_hit")


def test_greedy_decode_is_the_models_own() -> None:
    lab = Lab(prefill_rows=16)
    prompt = prompt_of([BOS], doc(40, 4))
    ids = list(prompt.token_ids)
    result = lab.run(prompt, "full", max_tokens=12)
    for token in result.token_ids:
        assert token == int(lab.native(prompt_of(ids))[-1].argmax())
        ids.append(token)


def test_length_and_stop_tokens() -> None:
    lab = Lab()
    prompt = prompt_of([BOS], doc(10, 4))
    tokens = lab.run(prompt, "full", max_tokens=5).token_ids
    request = replace(lab.add(prompt, "full").request, params=SamplingParams(max_tokens=5, stop_token_ids=(tokens[2],)))
    sequence = lab.engine.add(request)
    (output,) = lab.engine.run([sequence])
    assert output.token_ids == tokens[:3]
    assert output.finish_reason == "stop"
    empty = lab.run(prompt, "full", max_tokens=0)
    assert empty.token_ids == ()


def test_a_bias_for_a_token_that_doesnt_exist_is_refused_before_anything_runs() -> None:
    lab = Lab()
    good = lab.add(prompt_of([BOS], doc(5, 1)), "prefix").request
    bad = replace(good, params=SamplingParams(logit_bias={lab.model.vocab_size: 1.0}))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        lab.engine.add(bad)
    edge = replace(good, samples=2, params=SamplingParams(max_tokens=1, temperature=1.0, seed=2**63 - 1))
    assert len(lab.engine.run([lab.engine.add(edge)])) == 2


@pytest.mark.parametrize("technique", ["full", "prefix", "naive", "epic:k=2"])
def test_prompt_logprobs_are_the_models_own_and_none_where_kv_was_reused(technique: str) -> None:
    documents, prompt = standard()
    lab = Lab(prefill_rows=24)
    lab.precompute(*documents)
    if technique == "prefix":
        lab.run(prompt_of([BOS, 5, 9], doc(12, 77)), "prefix")
    made = make_technique(technique)
    request = Request(prompt, SamplingParams(max_tokens=0), made, made.reuse, ((BOS,),), prompt_logprobs=2)
    (output,) = lab.engine.run([lab.engine.add(request)])
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    native = lab.native(prompt).float().log_softmax(-1)
    computed = [i for i, found in enumerate(output.prompt_logprobs) if found is not None]
    if technique == "full":
        assert computed == list(range(1, len(prompt.token_ids)))
    for i in computed if technique in ("full", "prefix") else ():
        found = output.prompt_logprobs[i]
        assert found is not None
        assert found.token_id == prompt.token_ids[i]
        assert found.logprob == pytest.approx(float(native[i - 1, found.token_id]), abs=1e-3)
        assert [t for t, _ in found.top] == native[i - 1].topk(2).indices.tolist()
    reused = output.reuse.cached_tokens + output.reuse.fused_tokens
    assert len(computed) <= len(prompt.token_ids) - reused


def test_what_the_server_chose_itself_has_no_reason() -> None:
    _, prompt = standard()
    made = make_technique("naive")
    lab = Lab()
    for asked, reason in (("fused", "no_chunk_hit"), ("auto", None)):
        request = Request(prompt, SamplingParams(max_tokens=0), made, asked, ((BOS,),))
        (output,) = lab.engine.run([lab.engine.add(request)])
        assert (output.reuse.ran, output.reuse.fallback_reason) == ("exact", reason)
