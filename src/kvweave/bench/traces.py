"""Retrieval traces: which documents each query of a RAG system got, in order. From a file, or drawn by Zipf's law."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.bench.texts import Document, Library
from kvweave.documents import DocumentFile
from kvweave.errors import InvalidOption

_ZIPF_EXPONENT = 1.0
_DRAWS = 1000  # of combinations that turn out to be known, before the pool counts as used up


@dataclass(frozen=True)
class Query:
    """The documents one query retrieved, best first. ``question`` is None where the trace names none."""

    documents: tuple[Document, ...]
    question: str | None = None


def read_trace(path: Path, documents: Sequence[DocumentFile], requests: int) -> list[Query]:
    """The first ``requests`` lines of a JSONL file; a line is a list of document ids, or an object with ``documents`` (such
    a list) and perhaps ``question``.

    Raises ``InvalidOption`` for a file that can't be read, a line of another form, an unknown id or too few lines.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"The trace '{path}' can't be read ({error}). Name a JSONL file.") from error
    if len(lines) < requests:
        raise InvalidOption(f"The trace '{path}' has {len(lines)} queries. Use --requests {len(lines)} or fewer.")
    by_id = {document.id: Document(document.id, document.text) for document in documents}
    return [_query(line, by_id, f"{path}:{number}") for number, line in enumerate(lines[:requests], 1)]


def zipf_trace(library: Library, requests: int, documents: int, pool: int, seed: int) -> list[Query]:
    """Queries that each draw ``documents`` of ``pool`` documents; the k-th is drawn in proportion to 1/k. No
    combination comes twice: what repeats is single documents, as in retrieval over a corpus with favourites.

    Raises ``InvalidOption`` where the pool has too few combinations.
    """
    if pool < documents:
        raise InvalidOption(f"--pool is {pool}, a query takes {documents} documents. Use a larger pool.")
    chance = random.Random(seed)
    corpus = library.take(pool)
    weights = [1 / rank**_ZIPF_EXPONENT for rank in range(1, pool + 1)]
    seen: set[frozenset[int]] = set()
    queries = []
    for _ in range(requests):
        picked = _new_combination(chance, weights, documents, seen)
        seen.add(frozenset(picked))
        queries.append(Query(tuple(corpus[index] for index in picked)))
    return queries


def _new_combination(chance: random.Random, weights: list[float], count: int, seen: set[frozenset[int]]) -> list[int]:
    for _ in range(_DRAWS):
        # Efraimidis and Spirakis (2006): the largest keys u^(1/w) are a weighted draw without replacement.
        keys = [(chance.random() ** (1 / weight), index) for index, weight in enumerate(weights)]
        picked = [index for _, index in sorted(keys, reverse=True)[:count]]
        if frozenset(picked) not in seen:
            return picked
    raise InvalidOption(
        f"After {len(seen)} queries no new combination of {count} documents comes up. Use a larger --pool or fewer "
        "--requests."
    )


def _query(line: str, by_id: dict[str, Document], where: str) -> Query:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidOption(f"{where} is not JSON ({error}). Write a list of document ids.") from error
    ids, asked = (entry.get("documents"), entry.get("question")) if isinstance(entry, dict) else (entry, None)
    if not isinstance(ids, list) or not ids or not isinstance(asked, str | None):
        raise InvalidOption(f'{where} is no query. Write ["id", ...] or {{"documents": ["id", ...], "question": "..."}}.')
    unknown = [id for id in ids if not isinstance(id, str) or id not in by_id]
    if unknown:
        raise InvalidOption(f"{where} names {unknown[0]!r}, which is no id of the documents. Check --docs.")
    return Query(tuple(by_id[id] for id in ids), asked)
