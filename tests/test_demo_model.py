"""The packaged demo model, end to end. Fetched once; the tests that need it are marked ``model``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch

from kvweave import LLM, Document, SamplingParams
from kvweave.evaluation.metrics import kl_divergence

pytestmark = pytest.mark.model
EXAMPLES = Path(__file__).parent.parent / "examples"

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
    "The three primary colours are",
    "List: apples, pears,",
    "In 1969, the first",
    "E = mc",
    "Dear Sir or Madam,",
    "The largest planet of the solar system",
    "To bake bread you need",
    "SELECT name FROM",
    "A haiku about rain:\n",
    "Monday, Tuesday,",
    "1, 1, 2, 3, 5,",
    "The opposite of hot is",
    "Translate to French: good morning ->",
    "Caf\u00e9 na\u00efve \u4f60\u597d",
    "Q: Who wrote Hamlet?\nA:",
    "import numpy as",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", threads=1, min_reuse_tokens=0, min_chunk=16) as made:
        yield made


def test_greedy_output_is_transformers_own(llm: LLM) -> None:
    """Full prefill and decode, 20 prompts in one ragged batch, against ``generate`` one by one."""
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=10), reuse="off")
    adapter = llm.engine.parts.adapter
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([llm.tokenizer.encode_text(prompt)])
        assert output.prompt_token_ids == tuple(ids[0].tolist())
        with torch.inference_mode(), adapter.native() as native:
            theirs = native.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        assert list(output.token_ids) == theirs[0, ids.shape[1] :].tolist(), prompt


def documents() -> dict[str, Document]:
    """The example documents, their first 60 words."""
    files = sorted((EXAMPLES / "documents").glob("*.md"))
    return {f.stem: Document(" ".join(f.read_text().split()[:60]), id=f.stem) for f in files}


def test_recomputing_what_deviates_repairs_more_than_random_rows(llm: LLM) -> None:
    """T23: distance to full prefill over a fixed set, deviation < random < none, at the same number of rows."""
    docs = documents()
    llm.precompute(list(docs.values()))
    lines = (EXAMPLES / "questions.jsonl").read_text().splitlines()[:2]
    errors: dict[str, list[float]] = {}
    for line in map(json.loads, lines):
        chat = [{"role": "user", "content": [*(docs[d] for d in line["documents"][:3]), line["question"]]}]
        answer = llm.chat(chat, SamplingParams(max_tokens=4), reuse="off").token_ids
        full = llm.score(chat, answer, reuse="off").logits
        for technique in ("naive", "random:ratio=0.3,full_layers=2", "cacheblend:ratio=0.3", "cacheblend:ratio=1"):
            llm.reset_prefix_cache()
            scores = llm.score(chat, answer, technique=technique)
            assert scores.reuse.budget == pytest.approx(
                {"naive": 0, "cacheblend:ratio=1": 1}.get(technique, 0.347), abs=5e-3
            )
            errors.setdefault(technique, []).append(float(kl_divergence(full, scores.logits).mean()))
    naive, random, deviation, everything = (fmean(errors[t]) for t in errors)
    assert everything < 1e-6
    assert deviation < random < naive
