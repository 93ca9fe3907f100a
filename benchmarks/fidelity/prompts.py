"""From data files to prompts: documents of one chunk each, then the question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.core.prompt import Document
from kvweave.errors import InvalidOption
from kvweave.evaluation.datasets import Example, load_dataset
from kvweave.models.tokenizer import Tokenizer

CHUNK = 512
QA_INSTRUCTION = "Answer the question from the passages above, with a few words and nothing else."


@dataclass(frozen=True)
class Item:
    """One record as it is asked."""

    example: Example
    documents: tuple[Document, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        question = self.example.question
        if self.example.task == "qa":
            question = f"{QA_INSTRUCTION}\nQuestion: {question}"
        return [{"role": "user", "content": [*self.documents, question]}]


def load_items(path: Path, tokenizer: Tokenizer, *, records: int, documents: int, tokens: int) -> list[Item]:
    """The first ``records`` of a file, each with ``documents`` documents of at most ``tokens`` tokens.

    The documents keep their order. Those that the record marks as supporting are in, or without marks those that hold an
    answer after cutting; the first others fill up. Raises ``InvalidOption`` if there are too few documents.
    """
    if not 1 <= tokens <= CHUNK or documents < 2:
        raise InvalidOption(f"{documents} documents of {tokens} tokens: use 2 or more documents of at most {CHUNK} tokens.")
    examples = load_dataset(path)[:records]
    marks = _marks(path) if examples[0].task == "qa" else [set() for _ in examples]
    items = []
    for example, marked in zip(examples, marks, strict=False):
        if len(example.documents) < documents:
            raise InvalidOption(f"Record {example.id} has {len(example.documents)} documents, {documents} are wanted.")
        texts = [_cut(tokenizer, text, tokens) for text in example.documents]
        if not marked and example.task == "qa":
            marked = {i for i, text in enumerate(texts) if any(a.lower() in text.lower() for a in example.answers)}
        chosen = sorted(sorted(range(len(texts)), key=lambda i: (i not in marked, i))[:documents])
        items.append(Item(example, tuple(Document(texts[i]) for i in chosen)))
    return items


def _marks(path: Path) -> list[set[int]]:
    """Per record the indices of the documents marked as supporting."""
    lines = [line for line in path.read_text("utf-8-sig").split("\n") if line.strip()]
    return [{i for i, c in enumerate(json.loads(line)["ctxs"]) if c.get("supporting")} for line in lines]


def _cut(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The start of a text, so that it is one chunk."""
    ids = tokenizer.encode_document(text)[:tokens]
    cut = tokenizer.decode(ids)
    if len(tokenizer.encode_document(cut)) > CHUNK:
        raise InvalidOption(f"A document cut to {tokens} tokens has more than {CHUNK} when read again. Use fewer tokens.")
    return cut
