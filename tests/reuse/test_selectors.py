"""Selectors against slow oracles (T16), and choosing under a budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.errors import InvalidOption
from kvweave.reuse.question import QuestionAttention
from kvweave.reuse.selectors.base import choose
from kvweave.reuse.selectors.deviation import VARIANTS, KVDeviation
from tests.matrix import adapter


def tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 9, 16, generator=generator) for _ in range(4)]


def oracle(variant: str, k1: torch.Tensor, v1: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor) -> list[float]:
    def norm2(t: torch.Tensor, j: int) -> float:
        return sum(float(x) ** 2 for head in t for x in head[j])

    n = k1.shape[1]
    dk = [norm2(k1 - k0, j) for j in range(n)]
    dv = [norm2(v1 - v0, j) for j in range(n)]
    mk = sum(norm2(k0, j) for j in range(n)) / n
    mv = sum(norm2(v0, j) for j in range(n)) / n
    table = {"k": (1, 0), "v": (0, 1), "kv_raw": (1, 1), "kv": (1 / mk, 1 / mv)}
    a, b = table[variant]
    return [a * x + b * y for x, y in zip(dk, dv, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_deviation_equals_its_formula(variant: str) -> None:
    k1, v1, k0, v0 = tensors()
    got = KVDeviation(variant).score(k1, v1, k0, v0)
    assert got.dtype == torch.float32
    assert torch.allclose(got, torch.tensor(oracle(variant, k1, v1, k0, v0)), rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "glm4", "cohere2", "phi3"])
def test_rotation_does_not_change_deviation(variant: str, family: str) -> None:
    k1, v1, k0, v0 = tensors(1)
    model = adapter(family)
    dim = model.layout.layers[0].key_dim
    tables = model.rotary.at(torch.arange(100, 109))
    rotated = [tables.rotate_keys(0, k[..., :dim].contiguous()) for k in (k1, k0)]
    plain = KVDeviation(variant).score(k1[..., :dim], v1, k0[..., :dim], v0)
    assert torch.allclose(KVDeviation(variant).score(rotated[0], v1, rotated[1], v0), plain, rtol=1e-4)


def test_normalising_keeps_loud_keys_from_deciding_alone() -> None:
    k1, v1, k0, v0 = tensors(2)
    plain = KVDeviation("kv").score(k1, v1, k0, v0)
    assert torch.allclose(KVDeviation("kv").score(100 * k1, v1, 100 * k0, v0), plain, rtol=1e-4)
    assert not torch.allclose(KVDeviation("kv_raw").score(100 * k1, v1, 100 * k0, v0), plain, rtol=0.1)


def test_unknown_deviation_is_refused() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'kv_raw'"):
        KVDeviation("kv-raw")


@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    keep=st.integers(0, 30),
    forced=st.sets(st.integers(0, 29)),
)
def test_choose_takes_the_best_and_breaks_ties_by_order(scores: list[int], keep: int, forced: set[int]) -> None:
    n = len(scores)
    always = torch.tensor([i in forced for i in range(n)])
    chosen = choose(torch.tensor(scores, dtype=torch.float32), min(keep, n), always=always).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(n, max(keep, int(always.sum())))
    ranked = sorted(range(n), key=lambda i: (not always[i], -scores[i], i))
    assert set(chosen) == set(ranked[: len(chosen)])


def test_question_scores_are_attention_and_tiles_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(4, 10, 16, generator=generator), torch.randn(2, 30, 16, generator=generator)
    results = []
    for tile in (3, 64):
        attention = QuestionAttention(torch.zeros(30), context=20, tile=tile)
        attention.observe(0, queries, keys, torch.arange(21, 31), 0.25)
        results.append(attention.scores)
        assert float(attention.scores.sum()) == pytest.approx(4 * 10, abs=1e-3)  # one a head and row
        assert not attention.scores[20:].any()  # keys of the question itself are left out
    assert torch.allclose(results[0], results[1], atol=1e-6)
    uniform = QuestionAttention(torch.zeros(30), context=20)
    uniform.observe(0, torch.zeros_like(queries), keys, torch.arange(21, 31), 0.25)
    assert torch.allclose(uniform.scores[:20], torch.full((20,), 40 / 20))
