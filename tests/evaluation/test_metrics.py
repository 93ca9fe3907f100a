"""Metrics: hand-worked values, bounds that hold for any input, and slow twins for what is computed cleverly."""

from __future__ import annotations

import builtins
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.errors import InvalidOption, MissingExtra
from kvweave.evaluation.metrics import (
    exact_match,
    first_line,
    kl_divergence,
    normalise,
    paired_bootstrap,
    rouge_l,
    summarise,
    token_f1,
    top1_agreement,
    upper_bound,
)

WORDS = st.text("ab the.,\n", max_size=20)
SCORES = st.lists(st.floats(-10, 10), min_size=1, max_size=30)

# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, a dog & an Owl!", "cat dog owl"),
        ("U.S.A.", "usa"),
        ("theatre anthem", "theatre anthem"),
        ("well-known", "wellknown"),
        ("The", ""),
        ("Ünïcode\u00a0Straße", "ünïcode straße"),
    ],
)
def test_normalise_is_squad_normalisation(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("Agnes Tolliver", ["Agnes Tolliver"], 1.0),
        ("  \nthe Agnes Tolliver.\nQuestion: who else?", ["agnes tolliver"], 1.0),
        ("It was Agnes Tolliver", ["Agnes Tolliver"], 2 * 0.5 * 1 / 1.5),
        ("Agnes", ["Agnes Tolliver"], 2 * 1 * 0.5 / 1.5),
        ("no no no", ["no"], 0.5),
        ("yes", ["no"], 0.0),
        ("Paris", ["London", "Paris"], 1.0),
        ("", ["Paris"], 0.0),
        ("Paris", ["the"], 0.0),
        ("a", ["the"], 1.0),
        ("wrong\nParis", ["Paris"], 0.0),
    ],
)
def test_token_f1_on_worked_examples(prediction: str, answers: list[str], score: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(score)


def test_token_f1_counts_what_the_tokenizer_yields() -> None:
    def letters(text: str) -> list[int]:
        return [ord(char) for char in text]

    assert token_f1("abc", ["abd"]) == 0
    assert token_f1("ABC!", ["abd"], letters) == pytest.approx(2 / 3)


@settings(deadline=None)
@given(prediction=WORDS, answers=st.lists(WORDS, min_size=1, max_size=3))
def test_f1_and_exact_match_agree_and_do_not_depend_on_order(prediction: str, answers: list[str]) -> None:
    score = token_f1(prediction, answers)
    assert 0 <= score <= 1
    assert score == token_f1(prediction, answers[::-1])
    assert score == max(token_f1(prediction, [answer]) for answer in answers)
    if exact_match(prediction, answers):
        assert score == 1
    line = first_line(prediction)
    assert token_f1(line, [answers[0]]) == pytest.approx(token_f1(answers[0].replace("\n", " "), [line]))


def test_exact_match_needs_every_word() -> None:
    assert exact_match("The Old Hannah.\nmore", ["x", "old hannah"])
    assert not exact_match("It is Old Hannah", ["old hannah"])


def test_rouge_l_on_worked_examples() -> None:
    assert rouge_l("the dogs were running", ["the dog was running"]) == pytest.approx(0.75)
    assert rouge_l("a b c d", ["a c"]) == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert rouge_l("a b", ["x y", "a b"]) == 1
    assert rouge_l("a\nb", ["a b"]) == 1, "the whole prediction counts, not its first line"
    assert rouge_l("", ["a b"]) == 0


def test_rouge_l_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("rouge_score"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtra, match=r"'rouge-score'.*kvweave\[eval\]"):
        rouge_l("a", ["a"])


@pytest.mark.parametrize("metric", [token_f1, exact_match, rouge_l])
@pytest.mark.parametrize("answers", [[], (), "Paris"])
def test_answers_must_be_a_list_with_something_in_it(metric: Callable[..., float], answers: object) -> None:
    with pytest.raises(InvalidOption, match="list of at least one"):
        metric("Paris", answers)


# --- distributions ----------------------------------------------------------------------------------------------------


def logits(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_kl_on_a_worked_example() -> None:
    p, q = logits([0.5, 0.5], [1.0, 0.0]), logits([0.25, 0.75], [0.5, 0.5])
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)]
    assert kl_divergence(p, q).tolist() == pytest.approx(expected)
    assert kl_divergence(q, p).tolist() == pytest.approx([0.25 * math.log(0.5) + 0.75 * math.log(1.5), math.inf])


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.floats(0, 50), shift=st.floats(-50, 50))
def test_kl_equals_a_slow_twin_and_does_not_see_a_constant(seed: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64) * scale
    slow = []
    for row_p, row_q in zip(p.tolist(), q.tolist(), strict=True):
        log_zp, log_zq = (max(r) + math.log(sum(math.exp(x - max(r)) for x in r)) for r in (row_p, row_q))
        slow.append(sum(math.exp(a - log_zp) * (a - log_zp - b + log_zq) for a, b in zip(row_p, row_q, strict=True)))
    result = kl_divergence(p, q)
    assert result.shape == (3,)
    assert result.tolist() == pytest.approx(slow, rel=1e-9, abs=1e-9)
    assert (result >= 0).all()
    torch.testing.assert_close(kl_divergence(p + shift, q), result, rtol=1e-9, atol=1e-9)
    assert kl_divergence(p, p).tolist() == [0, 0, 0]


def test_kl_types_shapes_and_broken_rows() -> None:
    p = torch.randn(4, 9).to(torch.bfloat16)
    assert kl_divergence(p, p.float()).dtype == torch.float32
    assert kl_divergence(p, p.double()).dtype == torch.float64
    assert kl_divergence(p[0], p[1]).shape == ()
    assert kl_divergence(p[:0], p[:0]).shape == (0,)
    assert kl_divergence(p.view(2, 2, 9), p.view(2, 2, 9)).shape == (2, 2)
    broken = torch.tensor([[math.nan, 0.0], [-math.inf, -math.inf], [0.0, 0.0]])
    assert kl_divergence(broken, torch.zeros(3, 2)).isnan().tolist() == [True, True, False]
    assert kl_divergence(torch.zeros(3, 2), broken).isnan().tolist() == [True, True, False]


def test_top1_agreement_with_ties_and_broken_rows() -> None:
    p = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [2.0, 2.0, 0.0], [math.nan, 1.0, 0.0], [-math.inf] * 3])
    q = torch.tensor([[0.0, 9.0, 1.0], [9.0, 0.0, 1.0], [0.0, 5.0, 0.0], [math.nan, 1.0, 0.0], [-math.inf] * 3])
    assert top1_agreement(p, q).tolist() == top1_agreement(q, p).tolist() == [1, 0, 1, 0, 0]
    x = torch.randn(50, 11)
    assert top1_agreement(x, x.to(torch.bfloat16)).dtype == torch.float32
    y = torch.randn(50, 11)
    assert torch.equal(top1_agreement(x, y).bool(), x.argmax(-1) == y.argmax(-1))


@pytest.mark.parametrize("metric", [kl_divergence, top1_agreement])
def test_logits_must_match(metric: Callable[[Tensor, Tensor], Tensor]) -> None:
    for p, q in [((2, 3), (2, 4)), ((2, 3), (3,)), ((), ()), ((2, 0), (2, 0))]:
        with pytest.raises(InvalidOption, match="shapes"):
            metric(torch.zeros(p), torch.zeros(q))


# --- series -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(a=SCORES, seed=st.integers(0, 100))
def test_the_interval_lies_within_the_differences(a: list[float], seed: int) -> None:
    b = [0.5 * x - 1 for x in a]
    mean, low, high = paired_bootstrap(a, b, resamples=200, seed=seed)
    differences = [x - y for x, y in zip(a, b, strict=True)]
    assert mean == pytest.approx(sum(differences) / len(a))
    assert min(differences) - 1e-9 <= low <= high <= max(differences) + 1e-9
    assert paired_bootstrap(a, b, resamples=200, seed=seed) == (mean, low, high)


def test_the_interval_has_the_width_of_theory() -> None:
    generator = np.random.default_rng(3)
    difference = generator.normal(0.3, 2.0, size=400)
    mean, low, high = paired_bootstrap(difference.tolist(), [0.0] * 400)
    half = 1.96 * difference.std() / math.sqrt(400)
    assert mean == pytest.approx(difference.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.02)
    assert paired_bootstrap([0.0] * 400, difference.tolist())[0] == pytest.approx(-mean)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for trial in range(200):
        values = np.random.default_rng(trial).normal(1.0, 1.0, size=40)
        _, low, high = paired_bootstrap(values.tolist(), [0.0] * 40, resamples=400, seed=trial)
        hits += low <= 1.0 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_clusters_widen_the_interval_and_weigh_by_size() -> None:
    rng = random.Random(0)
    level = [rng.gauss(0, 1) for _ in range(20)]
    values = [x for x in level for _ in range(10)]
    labels = [f"c{i}" for i in range(20) for _ in range(10)]
    zeros = [0.0] * 200
    _, low, high = paired_bootstrap(values, zeros)
    _, wide_low, wide_high = paired_bootstrap(values, zeros, clusters=labels)
    assert wide_high - wide_low > 2.5 * (high - low)
    # Copies within a cluster add nothing: the interval is that of the clusters alone.
    assert (wide_low, wide_high) == pytest.approx(paired_bootstrap(level, [0.0] * 20)[1:])
    assert paired_bootstrap(values, zeros, clusters=range(200)) == paired_bootstrap(values, zeros)
    mean, low, high = paired_bootstrap([0.0, 0.0, 3.0], [0.0] * 3, clusters=["x", "x", "y"])
    assert (mean, low, high) == (1, 0, 3)


def test_many_values_are_drawn_in_parts_of_bounded_memory() -> None:
    values = np.random.default_rng(0).normal(size=30_000).tolist()
    mean, low, high = paired_bootstrap(values, [0.0] * len(values), resamples=100)
    assert low < mean < high
    assert high - low < 0.03


@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        ([], [], {}),
        ([1.0], [1.0, 2.0], {}),
        ([math.nan], [0.0], {}),
        ([math.inf], [math.inf], {}),
        ([1.0], [1.0], {"resamples": 0}),
        ([1.0], [1.0], {"clusters": []}),
        ([1.0], [1.0], {"clusters": ["a", "b"]}),
    ],
)
def test_unusable_pairs_are_refused(a: list[float], b: list[float], options: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        paired_bootstrap(a, b, **options)


def test_summarise_on_worked_examples() -> None:
    assert summarise([3, 1, 2]) == {"mean": 2, "median": 2, "p95": 3, "n": 3}
    assert summarise(range(1, 101)) == {"mean": 50.5, "median": 50.5, "p95": 95, "n": 100}
    assert summarise([7.0]) == {"mean": 7, "median": 7, "p95": 7, "n": 1}
    assert summarise(torch.tensor([1.0, 3.0]))["mean"] == 2
    assert summarise([1.0] * 20 + [math.inf])["p95"] == 1
    assert summarise([1.0, math.inf])["mean"] == math.inf


@settings(deadline=None)
@given(values=SCORES)
def test_summarise_stays_within_the_values(values: list[float]) -> None:
    summary = summarise(values)
    assert summary["median"] <= summary["p95"] <= max(values)
    assert summary["p95"] in values
    assert min(values) - 1e-9 <= summary["mean"] <= max(values) + 1e-9
    assert sum(value <= summary["p95"] for value in values) >= 0.95 * len(values)


@pytest.mark.parametrize("values", [[], [1.0, math.nan]])
def test_nothing_and_nan_have_no_summary(values: list[float]) -> None:
    with pytest.raises(InvalidOption):
        summarise(values)


# --- the upper bound of a mean ----------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 1000).map(lambda n: n / 100), min_size=2, max_size=30, unique=True), st.sampled_from([0.5, 2, 8])
)
@settings(max_examples=50, derandomize=True)
def test_an_upper_bound_lies_above_the_mean_and_scales_with_the_unit(values: list[float], unit: float) -> None:
    mean, bound = sum(values) / len(values), upper_bound(values, resamples=200)
    assert bound >= mean - 1e-9
    assert upper_bound([value * unit for value in values], resamples=200) == pytest.approx(bound * unit, rel=1e-6, abs=1e-9)


def test_equal_values_are_their_own_bound() -> None:
    assert upper_bound([0.3] * 5) == pytest.approx(0.3)


def test_one_value_among_equal_ones_bounds_nothing() -> None:
    assert upper_bound([0.0] * 7 + [1.0]) == math.inf


def test_the_bound_covers_the_mean_of_skewed_values_where_percentiles_do_not() -> None:
    generator = np.random.default_rng(0)
    covered, by_percentiles, rounds, n = 0, 0, 300, 24
    for _ in range(rounds):
        values = generator.lognormal(0.0, 1.0, n)
        covered += upper_bound(values.tolist(), resamples=500) >= math.exp(0.5)  # its mean
        means = values[generator.integers(n, size=(500, n))].mean(axis=1)
        by_percentiles += np.quantile(means, 0.95) >= math.exp(0.5)
    assert covered / rounds > 0.86 > 0.84 > by_percentiles / rounds


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.inf], [1.0, math.nan]])
def test_a_bound_needs_finite_values(values: list[float]) -> None:
    with pytest.raises(InvalidOption, match="at least two finite values"):
        upper_bound(values)
