"""Every prompt token has one kind, also within each document."""

from __future__ import annotations

from collections import Counter

import pytest

from kvweave.core.report import TOKEN_KINDS, ReuseReport
from tests.lab import Lab, standard

TECHNIQUES = ["full", "prefix", "naive", "epic:k=4", "cacheblend:ratio=0.3", "cacheblend:ratio=1", "cacheblend:ratio=0"]


def inside(report: ReuseReport) -> Counter[str]:
    total: Counter[str] = Counter()
    for segment in report.segments:
        assert tuple(segment.tokens) == TOKEN_KINDS
        assert sum(segment.tokens.values()) == segment.stop - segment.start
        total.update(segment.tokens)
    return total


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("cached", [(), (1,), (0, 1, 2)])
def test_kinds_of_documents_never_exceed_those_of_the_prompt(technique: str, cached: tuple[int, ...]) -> None:
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(*(documents[i] for i in cached))
    for _ in range(2):  # cold, then behind what the first run left in the prefix tree
        report = lab.run(prompt, technique).report
        total = inside(report)
        assert total["fused"] == report.fused_tokens
        assert total["recomputed"] == report.recomputed_tokens
        assert total["exact"] <= report.cached_tokens
        assert total["prefilled"] < report.prefilled_tokens
        assert report.prefix_tokens <= report.cached_tokens


def test_a_missing_document_is_prefilled_and_the_others_are_not() -> None:
    lab = Lab()
    documents, prompt = standard()
    lab.precompute(documents[0], documents[2])
    report = lab.run(prompt, "cacheblend:ratio=0.5").report
    kinds = [segment.tokens for segment in report.segments]
    assert kinds[1] == dict.fromkeys(TOKEN_KINDS, 0) | {"prefilled": 56}
    for segment in (kinds[0], kinds[2]):
        assert segment["prefilled"] == 0
        assert segment["recomputed"] + segment["fused"] > 0
    assert report.recomputed_tokens > 0


def test_prefix_tokens_are_those_of_the_tree() -> None:
    lab = Lab()
    _, prompt = standard()
    assert lab.run(prompt, "prefix").report.prefix_tokens == 0
    again = lab.run(prompt, "prefix").report
    assert again.prefix_tokens == again.cached_tokens == len(prompt.token_ids) - 1
