"""Measuring for the gate: what is compared, when it is refused, and what the command leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvweave import LLM, SamplingParams
from kvweave.cli import main
from kvweave.core.report import ReuseReport
from kvweave.errors import DocumentError, InvalidOption
from kvweave.evaluation.datasets import Example
from kvweave.evaluation.gate import ANSWER_TOKENS, Bound, Divergence, PromptDivergence, digest, measure, verdict
from kvweave.evaluation.metrics import kl_divergence
from kvweave.reuse.gate import Gate, Gates, GateStore, gate_settings
from kvweave.reuse.naive import Naive, Raw
from kvweave.reuse.question import Question

OPTIONS = {"dtype": "float32", "threads": 1, "kv_pool": "64MiB"}
EXAMPLES = [
    Example(
        f"e{i}",
        tuple(f"Passage {i}.{j}: " + " ".join(str((i * 7 + j) * k % 997) for k in range(1, 60)) for j in range(3)),
        f"Which number comes after {i}?",
        (),
        "qa",
    )
    for i in range(8)
]


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, **OPTIONS) as model:
        yield model


@pytest.fixture(scope="module")
def results(llm: LLM) -> list[PromptDivergence]:
    return measure(llm, Question(ratio=0.2), EXAMPLES)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_every_prompt_is_fused_and_accounted_for(results: list[PromptDivergence]) -> None:
    assert [r.id for r in results] == [e.id for e in EXAMPLES]
    for result in results:
        result.reuse.check()
        assert result.reuse.technique == "question"
        assert result.reuse.fused_tokens > 0 < result.reuse.recomputed_tokens
        assert 1 <= result.answer_tokens <= ANSWER_TOKENS


def test_full_prefill_is_no_distance_from_itself_and_naive_reuse_is(results: list[PromptDivergence]) -> None:
    for result in results:
        full, naive = result.references["full"], result.references["naive"]
        assert max(full.first, full.answer) < 1e-9
        assert min(naive.answer, result.divergence.answer) > 1e-6


def test_all_tokens_computed_again_is_full_prefill(llm: LLM) -> None:
    for result in measure(llm, Question(ratio=1.0), EXAMPLES):
        assert result.divergence.answer < 1e-6 < result.references["naive"].answer


def test_a_divergence_is_that_of_the_logits_of_both(llm: LLM, results: list[PromptDivergence]) -> None:
    """The slow twin: by hand, from the answer on."""
    prompt = llm.render([{"role": "user", "content": [*(_documents(EXAMPLES[0])), EXAMPLES[0].question]}])
    llm.reset_prefix_cache()
    answer = llm.generate(prompt, SamplingParams(max_tokens=32), technique="full").token_ids
    logits = []
    for technique in ("full", "question:ratio=0.2"):
        llm.reset_prefix_cache()
        logits.append(llm.score(prompt, answer, technique=technique).logits)
    kl = kl_divergence(*logits)
    assert results[0].answer_tokens == len(answer) == len(kl)
    expected = [float(kl[0]), float(kl.mean())]
    torch.testing.assert_close([results[0].divergence.first, results[0].divergence.answer], expected, rtol=1e-3, atol=1e-7)


def _documents(example: Example) -> list[Any]:
    from kvweave import Document

    return [Document(text) for text in example.documents]


def test_what_has_no_gate_or_too_few_prompts_is_refused(llm: LLM) -> None:
    from kvweave.reuse.prefix import Prefix

    with pytest.raises(InvalidOption, match="'prefix' is exact reuse"):
        measure(llm, Prefix(), EXAMPLES)
    with pytest.raises(InvalidOption, match="7 prompts are too few"):
        measure(llm, Naive(), EXAMPLES[:7])


def test_a_prompt_that_would_not_be_fused_is_named(llm: LLM) -> None:
    short = Example("short", ("too little", "to reuse"), "What?", (), "qa")
    with pytest.raises(DocumentError, match=r"Prompt 'short' isn't fused but exact, because of no_chunk_hit"):
        measure(llm, Naive(), [short, *EXAMPLES])


def test_a_prompt_that_does_not_fit_is_named(llm: LLM) -> None:
    long = replace(EXAMPLES[0], id="long", question="? " * 8192)
    with pytest.raises(DocumentError, match="Prompt 'long' can't be measured"):
        measure(llm, Naive(), [long, *EXAMPLES])


def test_a_model_without_a_chat_template_is_measured_too(tmp_path: Path) -> None:
    from tests.conftest import write_tiny_model

    write_tiny_model(tmp_path, chat_template=None)
    with LLM(tmp_path, **OPTIONS) as llm:
        results = measure(llm, Raw(), EXAMPLES)
    assert all(r.reuse.fused_tokens > 0 for r in results)


# --- the verdict ------------------------------------------------------------------------------------------------------


def _results(*divergences: float) -> list[PromptDivergence]:
    report = ReuseReport(asked="fused", ran="fused", technique="naive", prompt_tokens=1, prefilled_tokens=1)
    return [PromptDivergence(str(i), 32, report, Divergence(d / 2, d)) for i, d in enumerate(divergences)]


def test_the_verdict_opens_the_gate_of_this_model_alone(llm: LLM, tmp_path: Path) -> None:
    divergences = [0.01, 0.02, 0.03, 0.01, 0.02, 0.02, 0.04, 0.01]
    record = verdict(llm, Naive(), _results(*divergences), limit=0.05, data="some")
    assert record.mean == pytest.approx(0.02)
    assert record.first_mean == pytest.approx(0.01)
    assert record.mean < record.upper < 0.04
    assert record.passed
    assert record.attention == llm.built.attention
    store = GateStore(tmp_path)
    store.write(record)
    assert Gates(store, llm.built.fingerprint, gate_settings(llm.config)).of(Naive()) == Gate("open", record.upper)


def test_a_mean_below_the_limit_is_not_enough(llm: LLM) -> None:
    record = verdict(llm, Naive(), _results(*[0.0] * 7, 0.3), limit=0.05, data="some")
    assert record.mean < 0.05 < record.upper
    assert not record.passed


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_distribution_never_passes(llm: LLM, broken: float) -> None:
    record = verdict(llm, Naive(), _results(*[0.0] * 7, broken), limit=1e9, data="some")
    assert (record.mean, record.upper) == (math.inf, math.inf)
    assert not record.passed


def test_a_limit_must_be_a_number_of_nats(llm: LLM) -> None:
    for limit in (-0.1, math.nan, math.inf):
        with pytest.raises(InvalidOption, match="out of range"):
            verdict(llm, Naive(), _results(0.1, 0.2), limit=limit, data="some")


def test_a_bound_lies_above_its_mean() -> None:
    bound = Bound.of([0.1, 0.2, 0.15, 0.4])
    assert bound.mean == pytest.approx(0.2125)
    assert bound.upper > bound.mean


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"question": e.question, "documents": e.documents}) for e in EXAMPLES]
    data.write_text("\n".join(lines))

    def call(*args: object) -> int:
        engine = ("--dtype", "float32", "--threads", 1, "--kv-pool", "64MiB")
        return main(["eval", "gate", str(tiny_model_dir), "--data", str(data), *map(str, (*engine, *args))])

    return call


def test_the_exit_code_is_the_verdict(run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A random model is fused with little error; a limit of 0 refuses it all the same."""
    assert run("--technique", "question", "--ratio", 0.2, "--limit", 10, "--json") == 0
    passed = json.loads(capsys.readouterr().out)
    assert (passed["gate"], passed["technique"], passed["options"]["ratio"]) == ("open", "question", 0.2)
    assert [prompt["id"] for prompt in passed["prompts"]] == [f"data:{line}" for line in range(1, 9)]
    assert passed["data"] == f"data.jsonl:{digest(EXAMPLES)}"
    assert passed["references"]["full"]["mean"] < 1e-9 < passed["mean"] < passed["upper"]
    assert Path(passed["record"]).parent == tmp_path / "home" / "gates"
    record = GateStore(tmp_path / "home").read(passed["fingerprint"], "question")
    assert record is not None
    assert record.upper == passed["upper"]

    assert run("--technique", "question", "--ratio", 0.2, "--limit", 0, "--dry-run") == 3
    *table, last = capsys.readouterr().out.splitlines()
    assert any("The gate is closed" in line and "nothing was written" in line for line in table)
    assert json.loads(last)["gate"] == "closed"
    assert GateStore(tmp_path / "home").read(passed["fingerprint"], "question") == record  # a dry run leaves it open

    assert run("--technique", "question", "--ratio", 0.2, "--limit", 0) == 3
    capsys.readouterr()
    assert main(["eval", "show", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["gates"]
    assert (shown["gate"], shown["upper"], shown["limit"]) == ("closed", passed["upper"], 0)
    assert main(["eval", "show"]) == 0
    assert "closed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "Who?", "documents": []}', "line 9: 'documents' is missing, empty or not a list"),
        ('{"question": "Who?", "documents": [3]}', "line 9, documents[0] is not a JSON object"),
        ('{"question": "Who?", "documents": ["a", {"text": " "}]}', "line 9, documents[1]: 'text' is missing, empty"),
        ('{"documents": ["a"]}', "line 9: 'question' is missing, empty"),
        ('{"question": "Who?", "documents": ["a"], "answers": [1]}', "line 9: 'answers' holds something"),
        ("{", "line 9 is not JSON"),
    ],
)
def test_bad_lines_are_refused_by_number(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, words: str
) -> None:
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    assert run() == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--technique", "prefix"), "has no gate"),
        (("--technique", "qestion"), "Did you mean 'question'"),
        (("--technique", "naive", "--ratio", 0.5), "not an option of technique 'naive'"),
        (("--limit", "nan"), "out of range"),
        (("--records", 7), "too few"),
        (("--records", 0), "--records"),
        (("--codec", "int3"), "codec"),
    ],
)
def test_usage_errors(run: Callable[..., int], capsys: pytest.CaptureFixture[str], args: Any, words: str) -> None:
    assert run(*args) == 2
    assert words in capsys.readouterr().err


def test_another_codec_is_another_gate(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    prints = []
    for codec in ("raw", "int8"):
        assert run("--technique", "naive", "--limit", 10, "--codec", codec, "--json") == 0
        prints.append(json.loads(capsys.readouterr().out)["fingerprint"])
    assert prints[0] != prints[1]
