"""Evaluation data: files the user has, read into one shape, :class:`Example`.

Three kinds of JSONL file are known by their keys:

* question answering, ``{question, answers[], ctxs[{title, text}], id?}``: the form of the CacheBlend authors' MuSiQue
  inputs (YaoJiayi/CacheBlend, ``inputs/musique_s.json``), to which HotpotQA, 2WikiMultihopQA and MuSiQue are easily
  converted; one document per entry of ``ctxs``;
* questions over documents, ``{question, documents[], answers[]?, id?}``: a document is a text or ``{title, text}``;
* dialogue summarisation, ``{dialogue, summary, id?, split?}`` (SAMSum, arXiv:1911.12237): made into few-shot prompts
  whose documents are worked examples, see :func:`few_shot`.

A file that doesn't hold what it should is refused with the number of the line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvweave.errors import ConfigError, DocumentError, InvalidOption

Record = Mapping[str, Any]

TOKENS_PER_WORD = 1.35
"""Estimate for English and subword vocabularies: documents are cut without a tokenizer, equally for every model."""

SUMMARY_INSTRUCTION = "Summarise this dialogue in one sentence."
_QA_KEYS = frozenset({"question", "answers", "ctxs"})
_DOCUMENT_KEYS = frozenset({"question", "documents"})
_SUMMARY_KEYS = frozenset({"dialogue", "summary"})


@dataclass(frozen=True)
class Example:
    """One question over several documents.

    ``documents`` are in the order of the prompt, each ``title + "\\n" + text`` where there is a title. ``answers`` are
    alternatives, any of which is right; none where the data has none. ``task`` tells which metrics fit: F1 and exact match
    for ``qa``, ROUGE-L for ``summary``.
    """

    id: str
    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    task: Literal["qa", "summary"]


def load_dataset(path: str | Path) -> list[Example]:
    """Read the JSONL file at ``path``; its kind is told by the keys of its first record.

    Raises:
        ConfigError: the file is missing, unreadable or of no known kind.
        DocumentError: a line is not JSON, lacks a key or has a value of the wrong type (the message has its number).
    """
    path = Path(path)
    numbered = list(_read_lines(path))
    if not numbered:
        raise DocumentError(f"Data set '{path}' is empty. Give a JSONL file, one record a line.")
    keys = numbered[0][1].keys()
    if keys >= _QA_KEYS:
        return _unique_ids([(f"'{path}' line {n}", _qa_example(path, n, record)) for n, record in numbered])
    if keys >= _DOCUMENT_KEYS:
        return _unique_ids([(f"'{path}' line {n}", _document_example(path, n, record)) for n, record in numbered])
    if keys >= _SUMMARY_KEYS:
        for number, record in numbered:
            _check_dialogue(f"'{path}' line {number}", record)
        return few_shot([record for _, record in numbered])
    shown = ", ".join(map(repr, sorted(keys)[:8]))
    raise ConfigError(
        f"Data set '{path}' has records of an unknown kind, with the keys {shown or 'none'}. "
        f"Known are question, answers, ctxs (question answering), question, documents (without answers) and "
        f"dialogue, summary (summarisation)."
    )


# --- few-shot summarisation -------------------------------------------------------------------------------------------


def few_shot(
    records: Sequence[Record],
    shots_per_chunk_tokens: int = 300,
    documents_per_example: tuple[int, int] = (6, 8),
    seed: int = 0,
) -> list[Example]:
    """Few-shot prompts for dialogue summarisation, the documents being groups of worked examples (shots).

    Shots come from the records of the ``train`` split, targets from ``test`` (without one: from all others). In a file
    without splits the first half gives shots, the second half targets. A shot whose dialogue is also a target is left
    out. Shots are joined to documents of two to four thirds of ``shots_per_chunk_tokens`` (words x 1.35), cut between
    shots only; a shot that is longer alone is left out, and so is a rest that is too short. Every example draws its
    documents from that one set, so documents recur with other neighbours and in another order, which is what chunk
    reuse is measured on.

    Args:
        records: ``{dialogue, summary, id?, split?}`` each.
        shots_per_chunk_tokens: the estimated size of a document that packing aims at.
        documents_per_example: least and most documents in one example.
        seed: chooses documents and their order. An example's choice depends on the seed and its own id alone, so
            leaving out some records changes nothing for the others as long as the shots are the same.

    Returns:
        One example per target, in the order of the records.

    Raises:
        InvalidOption: a size is out of range.
        DocumentError: a record is unusable (with its number, from 1), or there are too few shots or no targets.
    """
    fewest, most = documents_per_example
    if shots_per_chunk_tokens < 1 or not 1 <= fewest <= most:
        raise InvalidOption(
            f"few_shot got {shots_per_chunk_tokens} tokens a document and {fewest} to {most} documents an example. "
            f"Give at least 1, the least first."
        )
    for number, record in enumerate(records, start=1):
        _check_dialogue(f"Record {number}", record)
    shots, targets = _split(records)
    if not targets:
        raise DocumentError("There are no records to summarise. Add records of split 'test', or leave the splits out.")
    asked = {_same(record) for _, record in targets}
    documents = _pack([_shot(r) for r in shots if _same(r) not in asked], shots_per_chunk_tokens)
    if len(documents) < fewest:
        raise DocumentError(
            f"The shots fill {len(documents)} documents of about {shots_per_chunk_tokens} tokens, an example needs "
            f"{fewest}. Add records of split 'train', or ask for smaller or fewer documents."
        )
    examples = []
    for number, record in targets:
        name = _id_of(record, str(number), f"Record {number}")
        chooser = random.Random(f"{seed}:{name}")
        chosen = chooser.sample(documents, min(chooser.randint(fewest, most), len(documents)))
        question = f"{SUMMARY_INSTRUCTION}\n{record['dialogue'].strip()}\nSummary:"
        example = Example(name, tuple(chosen), question, (record["summary"].strip(),), "summary")
        examples.append((f"Record {number}", example))
    return _unique_ids(examples)


def _split(records: Sequence[Record]) -> tuple[list[Record], list[tuple[int, Record]]]:
    """Shots, and targets with the number of their record."""
    numbered = list(enumerate(records, start=1))
    splits = {record.get("split") for record in records}
    if splits <= {None}:
        half = len(numbered) // 2
        return [record for _, record in numbered[:half]], numbered[half:]
    shots = [record for record in records if record.get("split") == "train"]
    target = {"test"} if "test" in splits else splits - {"train"}
    return shots, [(number, record) for number, record in numbered if record.get("split") in target]


def _pack(shots: Sequence[str], aim: int) -> list[str]:
    """Join shots to documents of 2/3 to 4/3 of ``aim`` tokens: add the next that fits while that comes nearer to it."""
    # A dictionary, so that a shot that stands in the file twice is used once.
    sizes = {shot: estimate_tokens(shot) for shot in shots}
    left = [shot for shot in sizes if sizes[shot] <= aim * 4 / 3]
    documents = []
    while left:
        taken = [left.pop(0)]
        size = sizes[taken[0]]
        while size < aim:
            index = next((i for i, shot in enumerate(left) if size + sizes[shot] <= aim * 4 / 3), None)
            if index is None or (size >= aim * 2 / 3 and size + sizes[left[index]] - aim > aim - size):
                break
            taken.append(left.pop(index))
            size += sizes[taken[-1]]
        if size >= aim * 2 / 3:
            documents.append("\n\n".join(taken))
    return documents


def estimate_tokens(text: str) -> float:
    """Tokens in ``text``, estimated as words x 1.35."""
    return len(text.split()) * TOKENS_PER_WORD


def _shot(record: Record) -> str:
    return f"{record['dialogue'].strip()}\nSummary: {record['summary'].strip()}"


def _same(record: Record) -> str:
    """What two records with the same dialogue share, whatever their white space and case."""
    return " ".join(record["dialogue"].casefold().split())


# --- checks -----------------------------------------------------------------------------------------------------------


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"Data set '{path}' can't be read: {error.strerror or error}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"Data set '{path}' is not UTF-8 text (byte {error.start:,}). Save it as UTF-8.") from error
    # split, not splitlines: JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"'{path}' line {number} is not JSON. Write one object a line.") from error
        if not isinstance(record, dict):
            raise DocumentError(f"'{path}' line {number} is not a JSON object. Write one object a line.")
        yield number, record


def _qa_example(path: Path, number: int, record: Record) -> Example:
    where = f"'{path}' line {number}"
    answers = _answers(record, where)
    documents = tuple(_context(c, f"{where}, ctxs[{i}]") for i, c in enumerate(_list(record, "ctxs", where)))
    name = _id_of(record, f"{path.stem}:{number}", where)
    return Example(name, documents, _text(record, "question", where), answers, "qa")


def _document_example(path: Path, number: int, record: Record) -> Example:
    where = f"'{path}' line {number}"
    entries = _list(record, "documents", where)
    contexts = [{"text": entry} if isinstance(entry, str) else entry for entry in entries]
    documents = tuple(_context(c, f"{where}, documents[{i}]") for i, c in enumerate(contexts))
    name = _id_of(record, f"{path.stem}:{number}", where)
    answers = _answers(record, where) if "answers" in record else ()
    return Example(name, documents, _text(record, "question", where), answers, "qa")


def _answers(record: Record, where: str) -> tuple[str, ...]:
    answers = _list(record, "answers", where)
    if not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise DocumentError(f"{where}: 'answers' holds something that is not text. Give strings.")
    return tuple(answers)


def _context(context: object, where: str) -> str:
    if not isinstance(context, dict):
        raise DocumentError(f"{where} is not a JSON object. Give title and text.")
    text = _text(context, "text", where)
    title = context.get("title")
    if title is not None and not isinstance(title, str):
        raise DocumentError(f"{where}: 'title' is not text. Give a string, or leave it out.")
    return f"{title}\n{text}" if title and title.strip() else text


def _check_dialogue(where: str, record: Record) -> None:
    _text(record, "dialogue", where)
    _text(record, "summary", where)
    if not isinstance(record.get("split"), str | None):
        raise DocumentError(f"{where}: 'split' is not text. Give train or test, or leave it out.")


def _text(record: Record, key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DocumentError(f"{where}: '{key}' is missing, empty or not text. Give a string.")
    return value


def _list(record: Record, key: str, where: str) -> list[Any]:
    value = record.get(key)
    if not isinstance(value, list) or not value:
        raise DocumentError(f"{where}: '{key}' is missing, empty or not a list. Give at least one entry.")
    return value


def _id_of(record: Record, default: str, where: str) -> str:
    value = record.get("id")
    if value is not None and not isinstance(value, str | int):
        raise DocumentError(f"{where}: 'id' is neither text nor a whole number. Give one, or leave it out.")
    return default if value is None else str(value)


def _unique_ids(examples: Sequence[tuple[str, Example]]) -> list[Example]:
    """The examples without their places. Equal ids are refused: results could not be paired by them."""
    first: dict[str, str] = {}
    for place, example in examples:
        if example.id in first:
            raise DocumentError(f"{place}: the id '{example.id}' was used before ({first[example.id]}). Change one.")
        first[example.id] = place
    return [example for _, example in examples]
