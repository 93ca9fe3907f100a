"""What sampling parameters accept, refuse and keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvweave.core.sampling import SamplingParams
from kvweave.errors import InvalidOption

OUT_OF_RANGE: list[dict[str, object]] = [
    {"temperature": -0.1},
    {"temperature": float("nan")},
    {"temperature": "1"},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": 1.01},
    {"min_p": True},
    {"max_tokens": -1},
    {"max_tokens": None},
    {"min_tokens": 129},
    {"min_tokens": -1},
    {"seed": 2**63},
    {"logprobs": 21},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": float("inf")},
    {"logit_bias": {3: 101}},
    {"logit_bias": {-1: 1}},
    {"logit_bias": {"3": 1}},
    {"logit_bias": {3: float("nan")}},
    {"logit_bias": [(3, 1)]},
    {"stop": ("",)},
    {"stop": ("x" * 257,)},
    {"stop": tuple("abcdefghijklmnopq")},
    {"stop": (1,)},
    {"stop": 1},
    {"stop_token_ids": (-1,)},
    {"stop_token_ids": (True,)},
    {"ignore_eos": 1},
    {"skip_special_tokens": None},
    {"include_stop_str_in_output": "yes"},
]


@pytest.mark.parametrize("bad", OUT_OF_RANGE, ids=str)
def test_values_that_cannot_be_used_are_refused_by_name(bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(InvalidOption, match=f"{name}=.*Give") as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    assert caught.value.param == name
    assert len(str(caught.value)) < 250  # also for a stop string of any length


def test_the_ends_of_the_ranges_are_inside() -> None:
    params = SamplingParams(
        max_tokens=0,
        temperature=100,
        top_p=1,
        min_p=1,
        seed=-(2**63),
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -100, 7: 100.0},
        stop=["x" * 256] * 16,  # type: ignore[arg-type]
        stop_token_ids=[0],  # type: ignore[arg-type]
        logprobs=20,
    )
    assert params.stop == ("x" * 256,) * 16
    assert params.stop_token_ids == (0,)


def test_other_spellings_become_one() -> None:
    assert SamplingParams(stop="END") == SamplingParams(stop=("END",))  # type: ignore[arg-type]
    assert SamplingParams(top_k=-1) == SamplingParams()
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_it_can_be_hashed_and_keeps_a_copy_of_the_bias() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[6] = 2.0
    assert params.logit_bias == {5: 1.0}
    assert hash(params) == hash(replace(params))
    assert params == replace(params)
    assert params != SamplingParams(logit_bias={5: 2.0})
