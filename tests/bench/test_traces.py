"""Traces from files: what a line may be, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvweave.bench.traces import read_trace
from kvweave.documents import DocumentFile
from kvweave.errors import InvalidOption

DOCUMENTS = [DocumentFile(id, None, f"Text of {id}.", Path("x")) for id in ("a", "b", "c")]


def test_lines_are_lists_of_ids_or_objects_with_a_question(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('["b", "a"]\n{"documents": ["c"], "question": "Why?"}\n["a"]\n')
    first, second = read_trace(path, DOCUMENTS, 2)
    assert [document.text for document in first.documents] == ["Text of b.", "Text of a."]
    assert (first.question, second.question, second.documents[0].id) == (None, "Why?", "c")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('["a", "z"]', "trace.jsonl:2 names 'z'"),
        ("[]", "trace.jsonl:2 is no query"),
        ('{"docs": ["a"]}', "trace.jsonl:2 is no query"),
        ('{"documents": ["a"], "question": 3}', "is no query"),
        ("[0]", "names 0"),
        ("nonsense", "trace.jsonl:2 is not JSON"),
    ],
)
def test_other_lines_are_refused_with_their_number(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'["a"]\n{line}\n')
    with pytest.raises(InvalidOption, match=message):
        read_trace(path, DOCUMENTS, 2)
    assert len(read_trace(path, DOCUMENTS, 1)) == 1, "what isn't needed isn't read"


def test_a_trace_that_is_short_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('["a"]\n')
    with pytest.raises(InvalidOption, match="--requests 1"):
        read_trace(path, DOCUMENTS, 2)
    with pytest.raises(InvalidOption, match="can't be read"):
        read_trace(tmp_path / "none", DOCUMENTS, 1)
