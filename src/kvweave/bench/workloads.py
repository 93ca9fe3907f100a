"""What is asked: the patterns of repetition that caches differ by. Everything follows from a seed.

| workload | what repeats |
|---|---|
| fresh | nothing |
| repeat | whole prompts |
| permuted | the same documents in another order |
| dropped | the same documents, one of them left out |
| chat | a conversation that grows |
| trace | documents, in combinations that are new each time (a retrieval trace) |
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.errors import DocumentError, InvalidOption, suggest

Message = dict[str, str]
_SYLLABLES = [c + v for c in "bdfgklmnprst" for v in "aeo"]
_WORDS_PER_TOKEN = 0.45  # of the made-up text, about: it has no common words


@dataclass(frozen=True)
class Call:
    """One request: earlier messages, documents, and a question behind them."""

    documents: tuple[tuple[str, str], ...]
    """(label, text)"""
    question: str
    history: tuple[Message, ...] = ()
    after: int | None = None
    """Index of the call whose answer has to be there first."""


@dataclass(frozen=True)
class Shape:
    """How large prompts are: documents per request, tokens per document (about), documents there are."""

    documents: int = 6
    tokens: int = 512
    pool: int = 40
    seed: int = 0


class Texts:
    """Documents by number: those of files, or made-up ones of about ``shape.tokens`` tokens."""

    def __init__(self, shape: Shape, given: Sequence[tuple[str, str]] = ()) -> None:
        self._shape, self._given = shape, given

    def __len__(self) -> int:
        return len(self._given) or self._shape.pool

    def document(self, number: int) -> tuple[str, str]:
        if self._given:
            return self._given[number % len(self._given)]
        return f"doc:{number}", prose(self._shape.tokens, f"{self._shape.seed}/{number}")


def prose(tokens: int, seed: str) -> str:
    """Made-up text of about so many tokens."""
    chooser = random.Random(seed)
    words: list[str] = []
    while len(words) < max(4, tokens * _WORDS_PER_TOKEN):
        sentence = ["".join(chooser.choices(_SYLLABLES, k=chooser.randint(1, 3))) for _ in range(chooser.randint(6, 12))]
        words += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    return " ".join(words)


def make_calls(
    name: str, count: int, shape: Shape, texts: Texts, trace: Sequence[Sequence[int]] | None = None
) -> list[Call]:
    """``count`` calls of a workload; raises ``InvalidOption`` for one that doesn't exist."""
    if name not in WORKLOADS:
        raise InvalidOption(f"workload '{name}' is unknown. {suggest(name, WORKLOADS)}")
    if name == "trace":
        return list(_trace(count, shape, texts, trace))
    return list(WORKLOADS[name](count, shape, texts))


def _question(number: int, seed: int) -> str:
    return f"Question {number}.{seed}: what do these texts say about {prose(8, f'q{seed}/{number}')}"


def _fresh(count: int, shape: Shape, texts: Texts) -> Iterator[Call]:
    for i in range(count):
        numbers = range(i * shape.documents, (i + 1) * shape.documents)
        labelled = tuple((f"fresh:{n}", prose(shape.tokens, f"fresh/{shape.seed}/{n}")) for n in numbers)
        yield Call(labelled, _question(i, shape.seed))


def _repeat(count: int, shape: Shape, texts: Texts) -> Iterator[Call]:
    documents = tuple(texts.document(n) for n in range(shape.documents))
    for _ in range(count):
        yield Call(documents, _question(0, shape.seed))


def _permuted(count: int, shape: Shape, texts: Texts) -> Iterator[Call]:
    chooser = random.Random(shape.seed)
    documents = [texts.document(n) for n in range(shape.documents)]
    for i in range(count):
        before = list(documents)
        while len(documents) > 1 and documents == before:
            chooser.shuffle(documents)
        yield Call(tuple(documents), _question(i, shape.seed))


def _dropped(count: int, shape: Shape, texts: Texts) -> Iterator[Call]:
    documents = [texts.document(n) for n in range(shape.documents + 1)]
    for i in range(count):
        left_out = i % len(documents)
        yield Call(tuple(d for n, d in enumerate(documents) if n != left_out), _question(i, shape.seed))


def _chat(count: int, shape: Shape, texts: Texts) -> Iterator[Call]:
    """Answers are made up as well, so that every server sees the same history."""
    history: list[Message] = [{"role": "user", "content": prose(shape.tokens * 2, f"chat/{shape.seed}")}]
    for i in range(count):
        history.append({"role": "assistant", "content": prose(shape.tokens // 8, f"answer/{shape.seed}/{i}")})
        yield Call((), _question(i, shape.seed), tuple(history), after=i - 1 if i else None)
        history.append({"role": "user", "content": _question(i, shape.seed)})


def _trace(count: int, shape: Shape, texts: Texts, trace: Sequence[Sequence[int]] | None) -> Iterator[Call]:
    """Combinations that don't come twice; without a trace, documents are drawn by Zipf's law."""
    chooser, seen = random.Random(shape.seed), set()
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    most = min(shape.documents, len(texts))
    for i in range(count):
        if trace is not None:
            numbers = list(trace[i % len(trace)])[: shape.documents]
        else:
            numbers = []
            while len(numbers) < most or tuple(numbers) in seen:
                numbers = list(dict.fromkeys(chooser.choices(range(len(texts)), weights, k=4 * most)))[:most]
            seen.add(tuple(numbers))
        yield Call(tuple(texts.document(n) for n in numbers), _question(i, shape.seed))


WORKLOADS: dict[str, Callable[[int, Shape, Texts], Iterator[Call]]] = {
    "fresh": _fresh,
    "repeat": _repeat,
    "permuted": _permuted,
    "dropped": _dropped,
    "chat": _chat,
    "trace": lambda count, shape, texts: _trace(count, shape, texts, None),
}


def read_trace(path: Path) -> list[list[int]]:
    """A JSONL file whose lines are lists of document numbers, or objects with them under ``documents``."""
    trace = []
    for number, line in enumerate(_lines(path), 1):
        try:
            data = json.loads(line)
        except ValueError as error:
            raise DocumentError(f"{path}, line {number}: not JSON. Write a list of document numbers per line.") from error
        numbers = data.get("documents") if isinstance(data, dict) else data
        if not isinstance(numbers, list) or not numbers or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise DocumentError(f"{path}, line {number}: expected a list of document numbers.")
        trace.append(numbers)
    if not trace:
        raise DocumentError(f"{path} has no lines. Write a list of document numbers per line.")
    return trace


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"{path} can't be read: {error}. Check its path.") from error
