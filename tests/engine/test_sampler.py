"""Sampling and the text of an answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.core.sampling import SamplingParams
from kvweave.engine.sampler import Sampler
from kvweave.engine.text_stream import TextStream

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])


def draws(n: int = 200, **options: object) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3, **options))  # type: ignore[arg-type]
    return [sampler.sample(LOGITS)[0] for _ in range(n)]


def test_greedy_is_the_argmax() -> None:
    assert Sampler(SamplingParams()).sample(LOGITS)[0] == 1


def test_seed_reproduces_and_filters_filter() -> None:
    assert draws() == draws()
    assert set(draws()) >= {0, 1, 2, 4}
    assert set(draws(top_k=2)) == {1, 4}
    assert set(draws(top_k=1)) == {1}
    assert set(draws(top_p=0.5)) == {1, 4}  # the token that reaches p is kept
    assert set(draws(top_p=1e-6)) == {1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1))
    assert {sampler.sample(LOGITS)[0] for _ in range(20)} == {1}


def test_logprobs_are_of_the_unfiltered_distribution() -> None:
    _, logprob = Sampler(SamplingParams(temperature=0.7, top_k=1, logprobs=2)).sample(LOGITS)
    assert logprob is not None
    expected = LOGITS.log_softmax(-1)
    assert logprob.logprob == pytest.approx(float(expected[1]))
    assert [t for t, _ in logprob.top] == [1, 4]
    assert Sampler(SamplingParams()).sample(LOGITS)[1] is None


class Letters:
    """Token i is the i-th piece."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
def test_stream_ends_in_front_of_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    stream = TextStream(Letters(pieces), tuple(stops))
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push(i)
        if stream.stopped:
            break
    shown += stream.flush()
    full = "".join(pieces)
    assert shown == stream.text
    assert full.startswith(shown)
    assert not any(s in shown for s in stops)
    if not stream.stopped:
        assert shown == full
        assert not any(s in full for s in stops)
