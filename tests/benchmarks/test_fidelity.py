"""The fidelity benchmark on a tiny random model: its gates, its JSON and the direction of its numbers."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity import arms, prompts
from benchmarks.fidelity.__main__ import main
from kvweave.models.tokenizer import Tokenizer
from kvweave.reuse.cacheblend import CacheBlend
from kvweave.reuse.epic import Epic
from kvweave.reuse.naive import Naive
from kvweave.reuse.random_rows import Random

ARMS = ("naive", "raw", "epic:k=4", "epic:ratio=1.0", "random:ratio=0.3", "cacheblend:ratio=0.3", "cacheblend:ratio=1.0")


def write_questions(path: Path, records: int = 2) -> Path:
    with path.open("w") as file:
        for r in range(records):
            ctxs = [
                {"title": "", "text": f"Note {r}{d}: " + f"the {r + d * 7} boats of town {d} leave early. " * 3}
                for d in range(4)
            ]
            ctxs[3]["supporting"] = True  # type: ignore[assignment]
            record = {"question": f"How many boats {r}?", "answers": [f"{r + 7}"], "ctxs": ctxs}
            file.write(json.dumps(record) + "\n")
    return path


def command(model: Path, data: Path, *more: str) -> list[str]:
    sizes = ("--documents", "3", "--document-tokens", "60", "--answer-tokens", "4", "--dtype", "float32")
    return ["--model", str(model), "--data", str(data), *sizes, *more]


@pytest.fixture(scope="module")
def result(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = write_questions(tmp_path_factory.mktemp("data") / "boats.jsonl")
    out = io.StringIO()
    extra = ("--draws", "2", "--score-arms", "full", "naive", "epic:k=4", "--gold-arms", "full", "naive")
    with contextlib.redirect_stdout(out):
        assert main(command(tiny_model_dir, data, "--arms", *ARMS, *extra)) == 0
    found: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return found


def row(result: dict[str, Any], spec: str, anchor: str = "head") -> dict[str, Any]:
    (found,) = [r for r in result["rows"] if (r["spec"], r["anchor"]) == (spec, anchor)]
    return found


def test_every_arm_has_one_row_with_all_columns(result: dict[str, Any]) -> None:
    expected = [("full", ""), ("full", ""), ("naive", "head"), ("naive", "bos"), *((a, "head") for a in ARMS[1:])]
    assert [(r["spec"], r["anchor"]) for r in result["rows"]] == expected
    columns = {"data", "technique", "options", "ratio", "anchor", "n", "budget", "kl_first", "kl_first_median"}
    columns |= {"kl_first_p95", "top1", "kl_answer", "kl_answer_median", "score", "f1_model_tokens", "gold_nll"}
    assert all(columns | {"ttft_ratio"} <= r.keys() for r in result["rows"])
    assert all(r["n"] == 2 for r in result["rows"])


def test_meta_says_what_was_measured(result: dict[str, Any]) -> None:
    meta = result["meta"]
    (file,) = meta["files"]
    assert (meta["dtype"], meta["threads"], meta["documents"]) == ("float32", 1, 3)
    assert file["data"] == "boats.jsonl"
    assert file["mean_reusable_tokens"] == {"head": 120, "bos": 180}  # the first document is exact behind the head


def test_recomputing_everything_is_full_prefill_and_reuse_is_not(result: dict[str, Any]) -> None:
    for spec in ("epic:ratio=1.0", "cacheblend:ratio=1.0"):
        assert row(result, spec)["kl_first"] < 1e-6
        assert row(result, spec)["kl_answer"] < 1e-6
        assert row(result, spec)["budget"] == 1.0
    assert row(result, "naive")["kl_first"] > 1e-4
    assert row(result, "raw")["kl_first"] > 1e-4


def test_measured_columns_are_there_for_the_arms_that_asked(result: dict[str, Any]) -> None:
    assert row(result, "naive")["gold_nll"] > 0
    assert row(result, "naive", "bos")["gold_nll"] is None
    assert row(result, "epic:k=4")["score"] is not None
    assert row(result, "epic:k=4")["gold_nll"] is None
    assert row(result, "epic:k=4")["ttft_ratio"] > 0
    mean, low, high = row(result, "epic:k=4")["recovered"]
    assert low <= mean <= high


@pytest.mark.parametrize(
    ("cls", "spec", "plan", "message"),
    [
        (Epic, "epic:ratio=1.0", lambda self, request: Naive().plan(request), "must equal full prefill"),
        (CacheBlend, "cacheblend:ratio=0.5", lambda self, request: Random(0.5).plan(request), "is charged 0.5"),
    ],
)
def test_a_failed_gate_ends_with_code_3(
    cls: type,
    spec: str,
    plan: Callable[..., Any],
    message: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_questions(tmp_path / "boats.jsonl", records=1)
    monkeypatch.setattr(cls, "plan", plan)
    assert main(command(tiny_model_dir, data, "--arms", spec, "--no-gold", "--score-arms", "full")) == 3
    assert message in " ".join(capsys.readouterr().err.split())


def test_arms_are_chosen_by_technique_or_spec() -> None:
    assert {a.technique for a in arms.select(["epic"], "head")} == {"epic"}
    assert arms.select(["epic:k=3"], None) == [arms.Arm("epic:k=3", "head")]
    assert arms.select(["naive"], None) == [arms.Arm("naive", "head"), arms.Arm("naive", "bos")]
    assert len(arms.Arm("random:ratio=0.05", "head").draws(3)) == 3
    assert len(arms.Arm("random:ratio=0.05,seed=7", "head").draws(3)) == 1


def test_supporting_documents_are_in_and_keep_their_order(tiny_model_dir: Path, tmp_path: Path) -> None:
    data = write_questions(tmp_path / "boats.jsonl")
    items = prompts.load_items(data, Tokenizer(tiny_model_dir), records=1, documents=3, tokens=64)
    starts = [d.content[:8] for d in items[0].documents]
    assert starts == ["Note 00:", "Note 01:", "Note 03:"]
