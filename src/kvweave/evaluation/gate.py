"""Measure how far a technique's answers are from full prefill: what opens the quality gate (docs/gate.md).

The answer is the one that full prefill gives, greedily. Teacher-forced on it, the next-token distributions of full prefill
and of the technique are compared token by token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import fmean

from blake3 import blake3
from torch import Tensor

from kvweave.core.prompt import Document, Prompt
from kvweave.core.report import ReuseReport
from kvweave.core.sampling import SamplingParams
from kvweave.errors import DocumentError, InvalidOption, RequestError
from kvweave.evaluation.datasets import Example
from kvweave.evaluation.metrics import kl_divergence, upper_bound
from kvweave.llm import LLM, Scores
from kvweave.reuse.base import Technique
from kvweave.reuse.gate import GateRecord, gate_settings, technique_options
from kvweave.reuse.registry import make_technique

ANSWER_TOKENS = 32
MIN_PROMPTS = 8
_REFERENCES = ("full", "naive")
_SEPARATOR = "\n\n"  # between the segments of a prompt without a chat template


@dataclass(frozen=True)
class Divergence:
    """KL(full || other) in nats: of the first answer token, and the mean over the first 32 (or all there are)."""

    first: float
    answer: float


@dataclass(frozen=True)
class PromptDivergence:
    """One prompt under the technique, and under the references: ``full`` once more, and ``naive``."""

    id: str
    answer_tokens: int
    reuse: ReuseReport
    divergence: Divergence
    references: dict[str, Divergence] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """Mean over prompts and its upper 95 % bound (``metrics.upper_bound``); infinite where a distribution broke."""

    mean: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Bound:
        if not all(math.isfinite(value) for value in values):
            return cls(math.inf, math.inf)
        return cls(fmean(values), upper_bound(values))


def measure(
    llm: LLM, technique: Technique, examples: Sequence[Example], *, progress: Callable[[str], None] | None = None
) -> list[PromptDivergence]:
    """Compare ``technique`` with full prefill on each example; ``progress`` gets a line after each.

    ``llm`` must be allowed to fuse, and nobody else may use it meanwhile: its prefix cache is emptied again and again.

    Raises:
        InvalidOption: the technique isn't fused, or there are fewer than 8 examples.
        DocumentError: an example doesn't fit the model, or so little of it can be reused that it wouldn't be fused.
    """
    if technique.reuse != "fused":
        raise InvalidOption(f"technique '{technique.name}' is {technique.reuse} reuse: it has no gate. Name a fused one.")
    if len(examples) < MIN_PROMPTS:
        raise InvalidOption(f"{len(examples)} prompts are too few to bound a mean. Give at least {MIN_PROMPTS}.")
    found = []
    for example in examples:
        try:
            found.append(_measure(llm, technique, example))
        except RequestError as error:
            raise DocumentError(f"Prompt '{example.id}' can't be measured: {error}") from error
        if progress is not None:
            progress(f"{example.id}: {found[-1].divergence.answer:.4f} nats")
    return found


def _measure(llm: LLM, technique: Technique, example: Example) -> PromptDivergence:
    prompt = _prompt(llm, example)
    answer = llm.generate(prompt, SamplingParams(max_tokens=ANSWER_TOKENS), technique="full").token_ids
    full = _score(llm, prompt, answer, make_technique("full")).logits
    llm.precompute(prompt.documents, head=prompt)
    scores = _score(llm, prompt, answer, technique)
    if scores.reuse.ran != "fused":
        raise DocumentError(
            f"Prompt '{example.id}' isn't fused but {scores.reuse.ran}, because of {scores.reuse.fallback_reason}. "
            "Leave it out, or give it longer documents."
        )
    others = [name for name in _REFERENCES if name != technique.name]
    references = {name: _compare(full, _score(llm, prompt, answer, make_technique(name)).logits) for name in others}
    return PromptDivergence(example.id, len(answer), scores.reuse, _compare(full, scores.logits), references)


def _prompt(llm: LLM, example: Example) -> Prompt:
    """Documents, then the question: as a chat if the model has a template, else as plain segments."""
    documents = [Document(text) for text in example.documents]
    if llm.tokenizer.has_chat_template:
        return llm.render([{"role": "user", "content": [*documents, example.question]}])
    return Prompt([part for document in documents for part in (document, _SEPARATOR)] + [example.question])


def _score(llm: LLM, prompt: Prompt, answer: Sequence[int], technique: Technique) -> Scores:
    llm.reset_prefix_cache()  # nothing is exact because it was just computed
    return llm.score(prompt, answer, technique=technique)


def _compare(full: Tensor, other: Tensor) -> Divergence:
    kl = kl_divergence(full, other)
    return Divergence(float(kl[0]), float(kl.mean()))


def verdict(llm: LLM, technique: Technique, results: Sequence[PromptDivergence], *, limit: float, data: str) -> GateRecord:
    """The record of a measurement. ``limit`` is in nats, ``data`` names what was asked."""
    if not 0 <= limit < math.inf:
        raise InvalidOption(f"limit={limit} is out of range. Use nats, from 0 up.")
    answer = Bound.of([result.divergence.answer for result in results])
    first = Bound.of([result.divergence.first for result in results])
    return GateRecord(
        fingerprint=llm.built.fingerprint.digest.hex(),
        technique=technique.name,
        options=technique_options(technique),
        settings=gate_settings(llm.config),
        limit=limit,
        mean=answer.mean,
        upper=answer.upper,
        first_mean=first.mean,
        first_upper=first.upper,
        prompts=len(results),
        data=data,
        model=llm.name,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        attention=llm.built.attention,
        version=version("kvweave"),
    )


def digest(examples: Sequence[Example]) -> str:
    """12 hex digits that change with any question or document."""
    content = [[example.question, *example.documents] for example in examples]
    return blake3(json.dumps(content).encode()).hexdigest()[:12]
