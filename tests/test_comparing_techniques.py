"""What comparisons of techniques stand on: several in one batch, and scores that don't leak the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvweave import LLM, Document, Prompt, SamplingParams
from kvweave.errors import InvalidRequest

DOCUMENTS = [Document(f"Document {i}: " + " ".join(f"{i * 31 + j * 17}" for j in range(30))) for i in range(3)]


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    options = {"dtype": "float32", "threads": 1, "kv_pool": "64MiB", "min_chunk": 8, "min_reuse_tokens": 0}
    with LLM(tiny_model_dir, **options) as model:
        model.precompute(DOCUMENTS)
        yield model


@pytest.fixture
def prompt(llm: LLM) -> Prompt:
    llm.reset_prefix_cache()
    return llm.render([{"role": "user", "content": [*DOCUMENTS, "Which number comes next?"]}])


def test_each_prompt_of_a_batch_may_have_its_own_technique(llm: LLM, prompt: Prompt) -> None:
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    techniques = ["naive", "epic:k=4", "cacheblend:ratio=0.5"]
    together = llm.generate([prompt] * 3, sampling, technique=techniques)
    assert [o.reuse.technique for o in together] == ["naive", "epic", "cacheblend"]
    for technique, output in zip(techniques, together, strict=True):
        llm.reset_prefix_cache()
        assert llm.generate(prompt, sampling, technique=technique).token_ids == output.token_ids


def test_techniques_must_be_as_many_as_prompts(llm: LLM, prompt: Prompt) -> None:
    with pytest.raises(InvalidRequest, match="2 techniques for 1 prompts"):
        llm.generate([prompt], technique=["naive", "raw"])


def test_question_attention_does_not_see_the_scored_answer(llm: LLM, prompt: Prompt) -> None:
    first = []
    for answer in ([20, 30, 40, 50], [90, 80, 70, 60]):
        llm.reset_prefix_cache()
        first.append(llm.score(prompt, answer, technique="question:ratio=0.1").logits[0])
    torch.testing.assert_close(first[0], first[1], rtol=1e-4, atol=1e-4)
