"""Data sets: the kinds of file, few-shot prompts without leaks, and refusals with the number of the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import ConfigError, DocumentError, InvalidOption, KvweaveError
from kvweave.evaluation.datasets import SUMMARY_INSTRUCTION, Example, estimate_tokens, few_shot, load_dataset

QA = {
    "question": "Who lit the lamp?",
    "answers": ["Ann", "Ann Lee"],
    "ctxs": [{"title": "Lamp", "text": "Ann lit it."}, {"title": "", "text": "Nobody else."}, {"text": "Or so."}],
}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def dialogues(count: int, split: str | None = "train", words: int = 60, start: int = 0) -> list[dict[str, Any]]:
    """Records whose dialogues share no line, so that a leak can be seen by searching for text."""
    numbers = range(start, start + count)
    made = [{"id": i, "dialogue": f"Speaker{i}: " + f"word{i} " * words, "summary": f"Speaker{i} talks."} for i in numbers]
    return made if split is None else [record | {"split": split} for record in made]


# --- question answering -----------------------------------------------------------------------------------------------


def test_a_qa_record_becomes_an_example(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", QA, "", QA | {"id": "q7"}, QA | {"id": 8})
    examples = load_dataset(path)
    documents = ("Lamp\nAnn lit it.", "Nobody else.", "Or so.")
    assert examples[0] == Example("set:1", documents, "Who lit the lamp?", ("Ann", "Ann Lee"), "qa")
    assert [example.id for example in examples] == ["set:1", "q7", "8"]


def test_other_keys_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(QA | {"type": "bridge"}).encode() + b"\r\n")
    assert len(load_dataset(str(path))) == 1


def test_questions_over_documents_need_no_answers(tmp_path: Path) -> None:
    record = {"question": "Who?", "documents": ["Plain.", {"title": "Lamp", "text": "Ann lit it."}]}
    examples = load_dataset(write(tmp_path / "set.jsonl", record, record | {"answers": ["Ann"], "id": 2}))
    documents = ("Plain.", "Lamp\nAnn lit it.")
    assert examples == [
        Example("set:1", documents, "Who?", (), "qa"),
        Example("2", documents, "Who?", ("Ann",), "qa"),
    ]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (QA | {"question": " "}, "'question' is missing, empty"),
        (QA | {"answers": []}, "'answers' is missing, empty"),
        (QA | {"answers": "Ann"}, "'answers' is missing, empty or not a list"),
        (QA | {"answers": ["Ann", 3]}, "'answers' holds something that is not text"),
        (QA | {"ctxs": {}}, "'ctxs' is missing"),
        (QA | {"ctxs": ["text"]}, "ctxs[0] is not a JSON object"),
        (QA | {"ctxs": [{"text": "x"}, {"title": "x"}]}, "ctxs[1]: 'text' is missing"),
        (QA | {"ctxs": [{"title": 3, "text": "x"}]}, "'title' is not text"),
        (QA | {"id": [1]}, "'id' is neither"),
        (QA | {"id": "first"}, "the id 'first' was used before"),
        ({"dialogue": "a", "summary": "b"}, "'answers' is missing"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, line: object, part: str) -> None:
    path = write(tmp_path / "set.jsonl", QA | {"id": "first"}, "", line)
    with pytest.raises(DocumentError) as caught:
        load_dataset(path)
    assert "line 3" in str(caught.value)
    assert part in str(caught.value)


def test_a_file_that_cannot_be_read_or_told_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_dataset(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="can't be read"):
        load_dataset(tmp_path)
    with pytest.raises(ConfigError, match="unknown kind, with the keys 'text'"):
        load_dataset(write(tmp_path / "a.jsonl", {"text": "x"}))
    with pytest.raises(DocumentError, match="is empty"):
        load_dataset(write(tmp_path / "b.jsonl", "", " "))
    (tmp_path / "c.jsonl").write_bytes(b'{"question": "\xff"}')
    with pytest.raises(DocumentError, match="byte 14"):
        load_dataset(tmp_path / "c.jsonl")


# --- few-shot summarisation -------------------------------------------------------------------------------------------


def test_a_dialogue_file_becomes_few_shot_examples(tmp_path: Path) -> None:
    records = dialogues(40) + dialogues(5, "test", start=100) + dialogues(5, "validation", start=200)
    examples = load_dataset(write(tmp_path / "set.jsonl", *records))
    assert [example.id for example in examples] == ["100", "101", "102", "103", "104"]
    for example, record in zip(examples, records[40:45], strict=True):
        assert example.task == "summary"
        assert example.answers == (record["summary"],)
        assert example.question == f"{SUMMARY_INSTRUCTION}\n{record['dialogue'].strip()}\nSummary:"
        assert 6 <= len(example.documents) == len(set(example.documents)) <= 8
        assert all(200 <= estimate_tokens(document) <= 400 for document in example.documents)


def test_documents_are_whole_shots_and_recur_in_other_orders() -> None:
    records = dialogues(40)
    shots = {f"{r['dialogue'].strip()}\nSummary: {r['summary']}" for r in records}
    examples = few_shot(records + dialogues(20, "test", start=100))
    used = [document for example in examples for document in example.documents]
    assert all(part in shots for document in used for part in document.split("\n\n"))
    assert len(set(used)) < len(used) / 5, "every document stands in several examples"
    assert len({example.documents for example in examples}) == len(examples)


def test_the_choice_depends_on_seed_and_id_alone() -> None:
    pool, targets = dialogues(40), dialogues(10, "test", start=100)
    examples = few_shot(pool + targets)
    assert few_shot(pool + targets) == examples
    assert few_shot(pool + targets[5:]) == examples[5:]
    assert few_shot(pool + targets, seed=1) != examples


def test_no_example_holds_its_own_target_even_if_the_splits_overlap() -> None:
    pool = dialogues(60)
    copies = [record | {"split": "test", "id": f"copy{i}"} for i, record in enumerate(pool[:10])]
    copies[0]["dialogue"] = copies[0]["dialogue"].upper().replace(" ", "  ")
    for example in few_shot(pool + copies):
        text = "".join(example.documents).casefold()
        assert not any(f"speaker{i}:" in text for i in range(10))


def test_a_file_without_splits_is_halved_and_one_without_test_uses_the_rest() -> None:
    assert [e.id for e in few_shot(dialogues(80, None))] == [str(i) for i in range(40, 80)]
    assert [e.id for e in few_shot(dialogues(40) + dialogues(2, "validation", start=90))] == ["90", "91"]
    without_ids = [{k: v for k, v in record.items() if k != "id"} for record in dialogues(80, None)]
    assert few_shot(without_ids)[0].id == "41"


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=40, max_size=60),
    aim=st.integers(100, 400),
)
def test_documents_keep_to_their_size_and_use_no_shot_twice(lengths: list[int], aim: int) -> None:
    pool = [dialogues(1, words=words, start=i)[0] for i, words in enumerate(lengths)]
    try:
        examples = few_shot(pool + dialogues(30, "test", start=900), aim, (1, 8))
    except DocumentError:
        examples = []  # possible: every shot may be longer than a document
    documents = {document for example in examples for document in example.documents}
    assert all(aim * 2 / 3 <= estimate_tokens(document) <= aim * 4 / 3 for document in documents)
    shots = [shot for document in documents for shot in document.split("\n\n")]
    assert len(shots) == len(set(shots))


@pytest.mark.parametrize(
    ("records", "part"),
    [
        (dialogues(40), "no records to summarise"),
        ([], "no records to summarise"),
        (dialogues(4) + dialogues(1, "test", start=9), "The shots fill 1 documents"),
        (dialogues(40, words=900) + dialogues(1, "test", start=90), "The shots fill 0 documents"),
        ([*dialogues(2), {"dialogue": "x"}], "Record 3: 'summary' is missing"),
        ([{"dialogue": "x", "summary": "y", "split": ["train"]}], "Record 1: 'split' is not text"),
        (dialogues(40) + dialogues(1, "test", start=90) * 2, "Record 42: the id '90' was used before (Record 41)"),
    ],
)
def test_unusable_records_are_refused(records: list[Mapping[str, Any]], part: str) -> None:
    with pytest.raises(DocumentError) as caught:
        few_shot(records)
    assert part in str(caught.value)


def test_a_bad_dialogue_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", *dialogues(2), "", {"dialogue": "x", "summary": 3})
    with pytest.raises(DocumentError, match="line 4: 'summary'"):
        load_dataset(path)


@pytest.mark.parametrize(("tokens", "documents"), [(0, (6, 8)), (300, (0, 8)), (300, (8, 6))])
def test_senseless_sizes_are_refused(tokens: int, documents: tuple[int, int]) -> None:
    with pytest.raises(InvalidOption):
        few_shot(dialogues(40), tokens, documents)


@settings(deadline=None)
@given(data=st.binary(max_size=80))
def test_any_bytes_give_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("d") / "set.jsonl"
    path.write_bytes(data)
    with pytest.raises(KvweaveError):
        load_dataset(path)
