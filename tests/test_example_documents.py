"""The demo's documents and questions fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvweave.documents import read_documents

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = [json.loads(line) for line in (EXAMPLES / "questions.jsonl").read_text().splitlines()]


def test_there_are_eight_documents_of_similar_size_in_ascii() -> None:
    documents = read_documents(EXAMPLES / "documents")
    assert len(documents) == 8
    assert all(document.text.isascii() for document in documents)
    assert all(340 <= len(document.text.split()) <= 420 for document in documents)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["answer"])
def test_an_answer_stands_in_exactly_one_document(question: dict[str, Any]) -> None:
    texts = {document.id: document.text for document in read_documents(EXAMPLES / "documents")}
    assert sorted(question["documents"]) == sorted(texts)
    assert sum(question["answer"] in text for text in texts.values()) == 1
    assert len(question["answer"].split()) <= 4


def test_every_question_has_its_own_order() -> None:
    assert len({tuple(question["documents"]) for question in QUESTIONS}) == len(QUESTIONS) == 6
