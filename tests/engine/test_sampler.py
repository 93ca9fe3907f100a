"""What is drawn from which logits, held against a slow twin; prompt log probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.core.sampling import SamplingParams
from kvweave.engine.sampler import Sampler, prompt_logprobs
from kvweave.errors import InvalidRequest, ModelError

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])
EOS = frozenset({4})


class Allow:
    """A constraint that allows the same tokens at every step, and is finished after so many."""

    def __init__(self, ids: Sequence[int], length: int = 100) -> None:
        self._mask = sum(1 << t for t in ids).to_bytes(1 + max(ids, default=0) // 8, "little")
        self._left = length

    @property
    def finished(self) -> bool:
        return self._left <= 0

    def allowed(self) -> bytes:
        return self._mask

    def accept(self, token: int) -> None:
        self._left -= 1


def draws(n: int = 200, logits: Tensor = LOGITS, **options: object) -> list[int]:
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, **options})  # type: ignore[arg-type]
    sampler = Sampler(params)
    return [sampler.sample(logits)[0] for _ in range(n)]


def twin(logits: list[float], prompt: list[int], answer: list[int], params: SamplingParams) -> list[float]:
    """Probabilities of the next token, token by token in double precision, as the parameters are defined."""
    row = [value + params.logit_bias.get(t, 0.0) for t, value in enumerate(logits)]
    if len(answer) < params.min_tokens:
        row = [-math.inf if t in EOS or t in params.stop_token_ids else value for t, value in enumerate(row)]
    for t, value in enumerate(row):
        if t in prompt or t in answer:
            row[t] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        row[t] -= answer.count(t) * params.frequency_penalty + (t in answer) * params.presence_penalty
    best = max(row)
    if params.greedy:
        return [float(t == row.index(best)) for t in range(len(row))]
    odds = [math.exp((value - best) / params.temperature) for value in row]
    odds = [o if o >= params.min_p * max(odds) else 0.0 for o in odds]
    order = sorted(range(len(odds)), key=odds.__getitem__, reverse=True)
    order = order[: params.top_k or len(order)]
    whole, mass, kept = sum(odds[t] for t in order), 0.0, set()
    for t in order:
        if mass < params.top_p * whole or not kept:
            kept.add(t)
        mass += odds[t]
    return [odds[t] / sum(odds[k] for k in kept) if t in kept else 0.0 for t in range(len(odds))]


OPTIONS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.8, 0.31]),
    top_k=st.sampled_from([0, 1, 3, 99]),
    min_p=st.sampled_from([0.0, 0.11, 0.57]),
    presence_penalty=st.sampled_from([0.0, 1.3, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.9, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.6]),
    logit_bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.1, 2.3]), max_size=3),
    stop_token_ids=st.sampled_from([(), (1,), (1, 500)]),
    min_tokens=st.sampled_from([0, 2, 6]),
    seed=st.just(7),
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    answer=st.lists(st.integers(0, 7), max_size=5),
    params=OPTIONS,
)
def test_draws_follow_the_definition(seed: int, prompt: list[int], answer: list[int], params: SamplingParams) -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(seed)) * 2
    expected = twin(logits.tolist(), prompt, answer, params)
    sampler = Sampler(params, prompt, EOS)
    counts: Counter[int] = Counter()
    for _ in range(1 if params.greedy else 300):
        state = Sampler(params, prompt, EOS)
        for token in answer:
            state._note(token)
        state._generator = sampler._generator  # one stream of numbers over all rounds
        counts[state.sample(logits)[0]] += 1
    assert all(expected[t] > 0 for t in counts)  # nothing that is filtered out
    distance = sum(abs(counts[t] / counts.total() - p) for t, p in enumerate(expected)) / 2
    assert distance < 0.12  # 5 standard deviations of 300 draws over 8 tokens


def test_greedy_is_the_argmax_and_copies_nothing() -> None:
    class Watched(Tensor):
        """Notes the operations that run on it."""

        seen: ClassVar[Counter[str]] = Counter()

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            cls.seen[func.__name__] += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    row = LOGITS.to(torch.bfloat16).as_subclass(Watched)
    Watched.seen.clear()
    assert Sampler(SamplingParams()).sample(row) == (1, None)
    assert set(Watched.seen) <= {"argmax", "__getitem__", "__get__", "__int__", "__float__"}


def test_a_seed_reproduces_and_another_one_does_not() -> None:
    assert draws() == draws()
    assert draws() != draws(seed=4)
    assert draws(seed=-1) == draws(seed=-1)
    assert draws(seed=None) != draws(seed=None)


def test_a_choice_takes_one_number_whatever_came_before() -> None:
    """So that the n-th token of a seed doesn't depend on the filters of those in front of it."""
    plain = Sampler(SamplingParams(temperature=1.0, seed=3))
    filtered = Sampler(SamplingParams(temperature=1.0, seed=3, top_k=2, top_p=0.9, min_p=0.1))
    for _ in range(5):
        plain.sample(LOGITS)
        filtered.sample(LOGITS)
    assert plain._generator.get_state().equal(filtered._generator.get_state())


def test_filters_filter() -> None:
    assert set(draws()) >= {0, 1, 2, 4}
    assert set(draws(top_k=2)) == {1, 4}
    assert set(draws(top_k=1)) == {1}
    assert set(draws(top_p=0.5)) == {1, 4}  # the token that reaches p is kept
    assert set(draws(top_p=1e-6)) == {1}
    assert set(draws(min_p=0.38)) == {1, 4}  # odds against the first: 0.61, 0.37, 0.14, 0.02
    assert set(draws(min_p=0.36)) == {1, 4, 2}
    assert set(draws(top_k=2, top_p=0.55)) == {1}  # a share of what the filters in front left
    assert set(draws(min_p=0.38, top_p=0.6)) == {1}
    assert set(draws(top_p=0.6)) == {1, 4}
    assert set(draws(min_p=1.0)) == {1}


@pytest.mark.parametrize("scale", [0.0, 0.001, 3.0])
def test_a_nucleus_in_a_large_vocabulary_is_the_same_found_either_way(scale: float) -> None:
    """Flat distributions need a full sort, steep ones don't."""
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(1)) * scale
    probabilities = logits.double().softmax(-1).sort(descending=True)
    size = int((probabilities.values.cumsum(-1) < 0.9).sum()) + 1
    nucleus = set(probabilities.indices[:size].tolist())
    drawn = set(draws(3000, logits, top_p=0.9))
    if scale == 0.0:  # all alike: any 1,800 of them
        assert 1300 < len(drawn) <= 1800
    else:
        assert drawn <= nucleus
        assert len(drawn) > 0.3 * size


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(draws(20, temperature=temperature)) == {1}
    assert set(draws(20, LOGITS * 1e6, temperature=temperature)) == {1}


def test_a_huge_temperature_is_a_fair_die() -> None:
    counts = Counter(draws(3000, temperature=100))
    assert all(500 < counts[t] < 700 for t in range(5))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_that_is_possible_is_the_one(options: dict[str, object], dtype: torch.dtype) -> None:
    logits = torch.full((50,), -math.inf, dtype=dtype)
    logits[17] = -1e4
    assert set(draws(20, logits, **options)) == {17}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"presence_penalty": 1.0}], ids=str)
def test_logits_that_are_no_numbers_end_this_request(bad: float, options: dict[str, object]) -> None:
    logits = LOGITS.clone()
    logits[3] = bad
    with pytest.raises(ModelError, match="dtype"):
        draws(1, logits, **options)


def test_min_tokens_holds_off_the_end_and_then_lets_it_come() -> None:
    logits = torch.tensor([0.0, 5.0, 1.0, 0.0, 9.0])
    sampler = Sampler(SamplingParams(min_tokens=2, stop_token_ids=(1, 70)), (), EOS)
    assert [sampler.sample(logits)[0] for _ in range(3)] == [2, 2, 4]
    with pytest.raises(InvalidRequest, match="min_tokens"):
        Sampler(SamplingParams(min_tokens=1, stop_token_ids=(0, 1)), (), EOS).sample(torch.zeros(2))


def test_a_bias_of_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="token 5") as caught:
        draws(1, logit_bias={5: 1.0})
    assert caught.value.param == "logit_bias"


def test_penalties_change_what_greedy_chooses() -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=0.3))
    assert [sampler.sample(LOGITS)[0] for _ in range(6)] == [1, 1, 4, 1, 4, 1]
    assert Sampler(SamplingParams(repetition_penalty=1.5), prompt_ids=(1, 4)).sample(LOGITS)[0] in (1, 2)
    assert Sampler(SamplingParams(repetition_penalty=2.0), prompt_ids=(1, 4)).sample(LOGITS)[0] == 2
    assert LOGITS.tolist() == [1.0, 3.0, 2.0, -1.0, 2.5]  # the row belongs to the engine


def test_a_constraint_comes_first_and_sees_every_token() -> None:
    constraint = Allow([0, 3], length=3)
    sampler = Sampler(SamplingParams(logit_bias={1: 100.0, 3: 1.5}), (), EOS, constraint)
    for _ in range(3):
        assert not sampler.finished
        assert sampler.sample(LOGITS)[0] == 0
    assert sampler.finished
    assert not Sampler(SamplingParams()).finished


def test_a_complete_answer_ends_even_if_it_is_short() -> None:
    params = SamplingParams(min_tokens=5)
    assert Sampler(params, (), EOS, Allow([4])).sample(LOGITS)[0] == 4
    assert Sampler(params, (), EOS, Allow([0, 4])).sample(LOGITS)[0] == 0
    with pytest.raises(InvalidRequest, match="No token may follow"):
        Sampler(SamplingParams(), (), EOS, Allow([])).sample(LOGITS)


def test_logprobs_are_of_the_unfiltered_distribution() -> None:
    options = {"temperature": 0.7, "top_k": 1, "logprobs": 2, "presence_penalty": 2.0, "logit_bias": {0: 9.0}}
    _, logprob = Sampler(SamplingParams(**options)).sample(LOGITS)  # type: ignore[arg-type]
    assert logprob is not None
    expected = LOGITS.log_softmax(-1)
    assert logprob.token_id == 0
    assert logprob.logprob == pytest.approx(float(expected[0]))
    assert [t for t, _ in logprob.top] == [1, 4]
    assert Sampler(SamplingParams()).sample(LOGITS)[1] is None
    more = Sampler(SamplingParams(logprobs=20)).sample(LOGITS)[1]
    assert more is not None
    assert len(more.top) == 5  # as many as there are
    assert dict(more.top)[more.token_id] == more.logprob  # the same float


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs_of_many_rows_are_those_of_each(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(150, 40, generator=generator).to(dtype)
    ids = torch.randint(0, 40, (150,), generator=generator)
    found = prompt_logprobs(logits, ids, 3)
    assert [entry.token_id for entry in found] == ids.tolist()
    for row, token, entry in zip(logits, ids.tolist(), found, strict=True):
        expected = row.double().log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert entry.top[0][1] == pytest.approx(float(expected.max()), abs=1e-5)
        assert all(logprob == entry.logprob for t, logprob in entry.top if t == token)
    assert prompt_logprobs(logits, ids, 0)[7].top == ()
    assert prompt_logprobs(logits[:0], ids[:0], 3) == []
