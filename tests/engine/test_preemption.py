"""More asked for than there is room: requests give slots back and go on later, with the same answers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvweave.core.sampling import SamplingParams
from kvweave.engine.admission import namespace
from kvweave.engine.sequence import Request
from kvweave.reuse.registry import make_technique
from tests.lab import BOS, Lab, doc, prompt_of, standard

LONG = 300  # answer tokens: more than slots are reserved for at a time


def request(prompt_number: int, technique: str = "prefix", **fields: object) -> Request:
    made = make_technique(technique)
    prompt = prompt_of([BOS, 3 + prompt_number], doc(30, prompt_number))
    return replace(Request(prompt, SamplingParams(max_tokens=LONG), made, made.reuse, ((BOS,),)), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("swap_bytes", [2**30, 0])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_preempted_requests_answer_as_if_they_were_alone(swap_bytes: int, family: str) -> None:
    lab = Lab(family, slots=620, swap_bytes=swap_bytes)
    together = lab.engine.run([lab.engine.add(request(i)) for i in range(4)])
    lab.engine.check_integrity()
    assert lab.engine.counters.preemptions > 0
    assert (lab.engine.counters.wasted["preemption"] == 0) == (swap_bytes > 0)
    assert lab.engine.admission.swap.used == 0
    for i, output in enumerate(together):
        alone = Lab(family)
        assert output.token_ids == alone.engine.run([alone.engine.add(request(i))])[0].token_ids


def test_what_a_preemption_repeats_is_not_usage() -> None:
    lab = Lab(slots=620, swap_bytes=0)
    outputs = lab.engine.run([lab.engine.add(request(i)) for i in range(4)])
    assert max(o.reuse.cached_tokens for o in outputs) <= 1, "the BOS at most"
    assert lab.engine.counters.wasted["preemption"] > 0
    assert sum(lab.engine.counters.tokens.values()) == sum(o.reuse.prompt_tokens for o in outputs)


def test_a_fused_answer_goes_on_bit_for_bit_after_a_swap() -> None:
    documents, prompt = standard()
    made = make_technique("epic:k=2")
    fused = Request(prompt, SamplingParams(max_tokens=LONG), made, made.reuse, ((BOS,),))
    expected = Lab()
    expected.precompute(*documents)
    (alone,) = expected.engine.run([expected.engine.add(fused)])
    lab = Lab(slots=1000)
    lab.precompute(*documents)
    older = [lab.engine.add(request(i)) for i in range(2)]
    sequence = lab.engine.add(fused)
    lab.engine.run([*older, sequence])
    assert sequence.output is not None
    assert lab.engine.counters.preemptions > 0
    assert sequence.output.token_ids == alone.token_ids
    assert sequence.output.reuse.fused_tokens == alone.reuse.fused_tokens > 0


def test_samples_share_their_prompt_and_go_their_own_ways() -> None:
    lab = Lab()
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    sequence = lab.engine.add(request(1, samples=3, params=params))
    outputs = lab.engine.run([sequence])
    assert [o.index for o in outputs] == [0, 1, 2]
    assert len({o.token_ids for o in outputs}) == 3
    assert lab.engine.counters.tokens["prefilled"] == outputs[0].reuse.prompt_tokens, "the prompt is computed once"
    lab.engine.check_integrity()
    for i, output in enumerate(outputs):
        alone = Lab()
        seeded = replace(params, seed=5 + i)
        assert alone.engine.run([alone.engine.add(request(1, params=seeded))])[0].token_ids == output.token_ids


def test_samples_may_be_preempted_and_cancelled() -> None:
    lab = Lab(slots=500)
    params = SamplingParams(max_tokens=LONG, temperature=1.0, seed=2)
    sequence = lab.engine.add(request(1, samples=3, params=params))
    outputs = lab.engine.run([sequence])
    assert [len(o.token_ids) for o in outputs] == [LONG] * 3
    assert lab.engine.counters.preemptions > 0
    lab.engine.check_integrity()
    again = lab.engine.add(request(2, samples=3, params=params))
    for _ in range(270):
        lab.engine.step()
    lab.engine.abort(again)
    lab.engine.check_integrity()
    assert lab.engine.scheduler.idle
    assert lab.engine.admission.swap.used == 0


@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_of_requests_and_cancellations_leaves_pool_and_tree_clean(seed: int) -> None:
    chooser = random.Random(seed)
    lab = Lab(slots=chooser.choice([400, 700]), swap_bytes=chooser.choice([0, 60_000, 2**30]), max_sequences=6)
    live = []
    for _ in range(400):
        if chooser.random() < 0.05:
            params = SamplingParams(max_tokens=chooser.choice([0, 1, 5, 300]))
            live.append(lab.engine.add(request(chooser.randint(0, 5), samples=chooser.choice([1, 1, 2]), params=params)))
        if live and chooser.random() < 0.02:
            lab.engine.abort(live.pop(chooser.randrange(len(live))))
        lab.engine.step()
        lab.engine.check_integrity()
    lab.engine.run([s for s in live if s.failure is None])
    lab.engine.check_integrity()
    lab.engine.tree.clear()
    assert lab.engine.allocator.num_free == lab.slots


def test_a_pinned_prefix_gives_way_before_a_request_waits_for_ever() -> None:
    lab = Lab(slots=200)
    lab.run(prompt_of([BOS], doc(150, 1)), "prefix")
    scope = lab.engine.parts.chunks.scope()
    assert lab.engine.tree.pin([BOS, *doc(150, 1)], namespace(scope), until=2**40) == 151
    small = lab.run(prompt_of([BOS, 4], doc(20, 2)), "prefix")
    assert small.report.prefilled_tokens > 0
    assert lab.engine.tree.pinned_tokens() == 151, "there was room without it"
    lab.run(prompt_of([BOS, 5], doc(120, 3)), "prefix")
    assert lab.engine.tree.pinned_tokens() == 0


def test_published_kv_expires() -> None:
    lab = Lab()
    (first,) = lab.engine.run([lab.engine.add(request(1, ttl=-1.0, params=SamplingParams(max_tokens=0)))])
    (again,) = lab.engine.run([lab.engine.add(request(1, params=SamplingParams(max_tokens=0)))])
    (third,) = lab.engine.run([lab.engine.add(request(1, params=SamplingParams(max_tokens=0)))])
    assert [o.reuse.cached_tokens > 0 for o in (first, again, third)] == [False, False, True]
