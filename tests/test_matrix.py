"""Families x techniques x attention backends: everything recomputed equals the model's own forward (T1, T10, T15)."""

from __future__ import annotations

import pytest
import torch

from kvweave.attention import BACKENDS
from tests.lab import BOS, Lab, close, doc, prompt_of, standard
from tests.matrix import FAMILIES

R1 = [
    "full",
    "prefix",
    "epic:ratio=1",
    "random:ratio=1",
    "random:ratio=1,full_layers=2",
    "cacheblend:ratio=1,check_layer=1",
    "cacheblend:ratio=1,check_layer=1,schedule=gradual",
    "question:ratio=1",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("technique", R1)
def test_all_rows_recomputed_is_the_full_prefill(family: str, technique: str) -> None:
    lab = Lab(family)
    documents, prompt = standard()
    lab.precompute(*documents)
    native = lab.native(prompt)
    result = lab.run(prompt, technique, keep=4)
    assert close(result.logits, native[-4:])
    full = lab.fresh().run(prompt, "full", keep=4)
    for ours, theirs in zip(result.keys + result.values, full.keys + full.values, strict=True):
        assert close(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", BACKENDS)
def test_backends_agree_with_the_model(family: str, attention: str) -> None:
    lab = Lab(family, attention=attention, prefill_rows=37)
    prompt = prompt_of([BOS], doc(90, 7))
    assert close(lab.run(prompt, "full", keep=91).logits, lab.native(prompt))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("technique", ["naive", "epic:k=4", "cacheblend:ratio=0.3,check_layer=1", "question:ratio=0.3"])
def test_backends_agree_on_scattered_rows(family: str, technique: str) -> None:
    """The fast kernels against the dense oracle where no causal flag is right."""
    documents, prompt = standard()
    results = []
    for attention in ("reference", "blocked", "sdpa"):
        lab = Lab(family, attention=attention)
        lab.precompute(*documents)
        results.append(lab.run(prompt, technique, keep=4).logits)
    assert close(results[1], results[0])
    assert close(results[2], results[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_reuse_without_repair_is_not_the_full_prefill(family: str) -> None:
    """Negative control: the equality above isn't vacuous, and leaving keys unrotated is another error still."""
    lab = Lab(family)
    documents, prompt = standard()
    lab.precompute(*documents)
    native = lab.native(prompt)
    naive = (lab.run(prompt, "naive").logits - native[-1:]).abs().max()
    assert naive > 1e-2
    lab.forget_prefixes()
    raw = lab.run(prompt, "raw").logits
    lab.forget_prefixes()
    assert (raw - lab.run(prompt, "naive").logits).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_equals_each_alone(family: str) -> None:
    """Fusion, cold prefill and decode in the same steps (T10)."""
    documents, prompt = standard()
    jobs = [
        (prompt, "cacheblend:ratio=0.3,check_layer=1"),
        (prompt_of([BOS], doc(60, 20)), "full"),
        (prompt_of([BOS, 8], ("doc", documents[1]), doc(5, 21)), "epic:k=3"),
        (prompt_of([BOS], doc(11, 22)), "prefix"),
    ]
    lab = Lab(family)
    lab.precompute(*documents)
    warm = lab.add(prompt_of([BOS], doc(30, 23)), "prefix", max_tokens=8)
    for _ in range(3):
        lab.engine.step()  # it decodes while the others prefill
    together = [lab.add(p, t, max_tokens=4) for p, t in jobs]
    lab.engine.run([warm, *together])
    lab.engine.check_integrity()
    for (one, technique), sequence in zip(jobs, together, strict=True):
        alone = lab.fresh()
        alone.precompute(*documents)
        expected = alone.run(one, technique, max_tokens=4)
        assert close(torch.cat(sequence.prompt_logits), expected.logits)
        assert sequence.output is not None
        assert sequence.output.token_ids == expected.token_ids
