"""One record under all arms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.fidelity.arms import FULL, NOISE, Arm
from benchmarks.fidelity.prompts import CHUNK, Item
from kvweave.core.prompt import Prompt
from kvweave.core.report import ReuseReport
from kvweave.core.sampling import SamplingParams
from kvweave.evaluation.metrics import kl_divergence, rouge_l, token_f1, top1_agreement
from kvweave.llm import LLM
from kvweave.reuse.base import Technique
from kvweave.reuse.cacheblend import CacheBlend


class GateFailed(Exception):
    """A sanity check of the harness failed: its numbers mean nothing."""


@dataclass(frozen=True)
class Settings:
    """What is measured on a record, beside the distance to full prefill."""

    answer_tokens: int
    draws: int
    noise_rows: int
    """Block size of the noise arm."""
    gold_arms: frozenset[str]
    score_arms: frozenset[str]


@dataclass
class Sample:
    """One arm on one record; means over draws where there are several."""

    budget: float
    kl_first: float
    kl_answer: float
    top1: float
    reusable: int
    extra: dict[str, float] = field(default_factory=dict)
    """gold_nll, score, f1_model_tokens, ttft_ratio: not measured on every arm and record."""


@dataclass(frozen=True)
class Measured:
    """One record: its samples and the prompt's length."""

    prompt_tokens: int
    samples: dict[Arm, Sample]


class Bench:
    """A model behind every anchor in use, each with a chunk store of its own."""

    def __init__(self, model: str, anchors: Sequence[str], settings: Settings, **options: Any) -> None:
        self.settings = settings
        self.llms = {
            anchor: LLM(model, anchor=anchor, chunk_size=CHUNK, min_chunk=1, min_reuse_tokens=0, **options)
            for anchor in anchors
        }
        self.base = next(iter(self.llms.values()))

    def measure(self, item: Item, arms: Sequence[Arm], *, check: bool, timed: bool) -> Measured:
        """All arms on one record. ``check``: the noise floor and arms that recompute everything as well."""
        greedy = SamplingParams(max_tokens=self.settings.answer_tokens)
        prompt = self.base.render(item.messages)
        full = self.base.generate(prompt, greedy, technique="full")
        answer = full.token_ids
        reference = self.base.score(prompt, answer, technique="full").logits
        samples = {FULL: Sample(1.0, 0.0, 0.0, 1.0, 0)}
        if check:
            with _block_size(self.base, self.settings.noise_rows):
                samples[NOISE] = _compare(reference, self.base.score(prompt, answer, technique="full").logits, None)
        for llm in self.llms.values():
            llm.precompute(item.documents, head=item.messages)
        for arm in arms:
            if check or not arm.full_ratio:
                samples[arm] = self._distance(arm, prompt, answer, reference)
            if timed and not arm.full_ratio:
                report = self._score(arm, arm.draws(1)[0], prompt, answer[:1])[1]
                samples[arm].extra["ttft_ratio"] = report.timings["prefill_ms"] / full.reuse.timings["prefill_ms"]
        self._gold(item, prompt, samples)
        samples[FULL].extra |= self._quality(item, full.text) if FULL.spec in self.settings.score_arms else {}
        self._answers(item, prompt, greedy, samples)
        return Measured(full.reuse.prompt_tokens, samples)

    def _score(self, arm: Arm, technique: Technique, prompt: Prompt, ids: Sequence[int]) -> tuple[Tensor, ReuseReport]:
        llm = self.llms.get(arm.anchor, self.base)
        llm.reset_prefix_cache()  # no arm sees what another one computed
        scores = llm.score(prompt, ids, technique=technique)
        if scores.reuse.technique != technique.name:
            raise GateFailed(f"{arm.spec} fell back to full prefill: {scores.reuse.fallback_reason}")
        return scores.logits, scores.reuse

    def _distance(self, arm: Arm, prompt: Prompt, answer: Sequence[int], reference: Tensor) -> Sample:
        found = []
        for technique in arm.draws(self.settings.draws):
            logits, report = self._score(arm, technique, prompt, answer)
            _check_budget(technique, report, self.llms[arm.anchor])
            found.append(_compare(reference, logits, report))
        budget, first, kl, top1 = (fmean(getattr(s, f) for s in found) for f in ("budget", "kl_first", "kl_answer", "top1"))
        return Sample(budget, first, kl, top1, found[0].reusable)

    def _gold(self, item: Item, prompt: Prompt, samples: dict[Arm, Sample]) -> None:
        ids = self.base.tokenizer.encode_text(item.example.answers[0])
        for arm, sample in samples.items():
            if arm is NOISE or arm.anchor not in ("", next(iter(self.llms))) or arm.spec not in self.settings.gold_arms:
                continue
            logits, _ = self._score(arm, arm.draws(1)[0], prompt, ids)
            nll = -torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids)]
            sample.extra["gold_nll"] = float(nll.mean())

    def _answers(self, item: Item, prompt: Prompt, greedy: SamplingParams, samples: dict[Arm, Sample]) -> None:
        """The arms' own answers. Fused requests of one record share a batch; they share nothing but the exact prefix."""
        arms = [a for a in samples if a.anchor == next(iter(self.llms)) and a.spec in self.settings.score_arms]
        if not arms:
            return
        self.base.reset_prefix_cache()
        techniques = [a.draws(1)[0] for a in arms]
        for arm, output in zip(arms, self.base.generate([prompt] * len(arms), greedy, technique=techniques), strict=True):
            samples[arm].extra |= self._quality(item, output.text)

    def _quality(self, item: Item, text: str) -> dict[str, float]:
        answers = item.example.answers
        if item.example.task == "summary":
            return {"score": rouge_l(text, answers)}
        return {
            "score": token_f1(text, answers),
            "f1_model_tokens": token_f1(text, answers, self.base.tokenizer.encode_text),
        }


@contextmanager
def _block_size(llm: LLM, rows: int) -> Iterator[None]:
    parts = llm.engine.parts
    llm.engine.reconfigure(prefill_rows=rows)
    try:
        yield
    finally:
        llm.engine.reconfigure(prefill_rows=parts.prefill_rows)


def _compare(reference: Tensor, logits: Tensor, report: ReuseReport | None) -> Sample:
    kl = kl_divergence(reference, logits)
    budget, reusable = (1.0, 0) if report is None else (report.budget, report.fused_tokens + report.recomputed_tokens)
    return Sample(budget, float(kl[0]), float(kl.mean()), float(top1_agreement(reference[:1], logits[:1])), reusable)


def _check_budget(technique: Technique, report: ReuseReport, llm: LLM) -> None:
    """The charge must be ((c + 1) + sum of the shares of the layers behind c) / L; nothing for naive reuse."""
    layout = llm.engine.parts.pool.layout
    n, layers = report.fused_tokens + report.recomputed_tokens, layout.num_layers
    if technique.reuse != "fused" or technique.name in ("naive", "raw"):
        expected = 0.0
    elif isinstance(technique, CacheBlend):
        checks = technique.checks(layout)
        ends = [layer for layer, _ in checks[1:]] + [layers - 1]
        heads = technique.head * len(report.segments) - technique.head * (report.cached_tokens > 0)
        shares = [max(heads, math.ceil(r * n)) / n * (end - at) for (at, r), end in zip(checks, ends, strict=True)]
        expected = (checks[0][0] + 1 + sum(shares)) / layers
    else:
        return
    if abs(report.budget - expected) > 1e-6:
        raise GateFailed(f"{technique} is charged {report.budget:.6f}, the formula says {expected:.6f}")
