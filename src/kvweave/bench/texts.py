"""The documents and questions that prompts are made of: from files, or pseudo-text that a seed fixes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvweave.documents import DocumentFile
from kvweave.errors import InvalidOption

_SENTENCE = (8, 16)  # words
_FREQUENT = """
about after again air all along always among animal answer around ask back because been before began behind being
below between book both boy build call came carry change children city close cold come country cut day different
door down draw each early earth east end enough even every example eye face family far farm father feet few field
find fire first fish follow food form found four friend full game girl give go good great green ground group grow
hand hard head hear help high hill home horse hour house idea important island keep kind king know land large last
late learn leave left letter life light line list live long look low made main make many mark mean men might mile
money morning mother mountain move much music name near need never new next night north note number old open order
over page paper part people picture place plan plant point power press problem public question read ready real red
remember rest right river road rock room round rule run school sea second see sentence set ship short show side
simple small snow song soon sound south stand star start state stay step still stop story street strong study sun
table talk teach tell ten thing think thought three time top town travel tree true turn under until voice walk wall
war warm watch water way week west white whole wind wood word work world write year young
"""
_WORDS = _FREQUENT.split()


@dataclass(frozen=True)
class Document:
    """A text that prompts share."""

    id: str
    text: str


class Library(Protocol):
    """Where a workload gets its documents from."""

    def take(self, count: int) -> tuple[Document, ...]:
        """``count`` documents that no earlier call returned."""


class PseudoTexts:
    """Endless documents of frequent English words: about ``tokens`` tokens each, one a word and one a full stop."""

    def __init__(self, tokens: int, seed: int, name: str = "text") -> None:
        self._tokens, self._seed, self._name = tokens, seed, name
        self._taken = 0

    def take(self, count: int) -> tuple[Document, ...]:
        ids = [f"{self._name}-{self._taken + n}" for n in range(count)]
        self._taken += count
        return tuple(Document(id, pseudo_text(self._tokens, f"{self._seed}/{id}")) for id in ids)


class FileTexts:
    """The documents of files, each handed out once."""

    def __init__(self, documents: Sequence[DocumentFile]) -> None:
        self._documents = [Document(document.id, document.text) for document in documents]
        self._taken = 0

    def take(self, count: int) -> tuple[Document, ...]:
        """Raises ``InvalidOption`` once the files hold too few."""
        first, self._taken = self._taken, self._taken + count
        if self._taken > len(self._documents):
            raise InvalidOption(
                f"This workload needs {self._taken} documents or more, the files hold {len(self._documents)}. "
                "Give more --docs, or use fewer --requests, --sets or --documents."
            )
        return tuple(self._documents[first : self._taken])


def pseudo_text(tokens: int, seed: str) -> str:
    """Sentences of random words, the same for the same ``seed``; ``tokens`` counts words and full stops."""
    chance = random.Random(seed)
    sentences: list[str] = []
    while tokens > 1:
        words = chance.choices(_WORDS, k=min(chance.randint(*_SENTENCE), tokens - 1))
        tokens -= len(words) + 1
        sentences.append(" ".join(words).capitalize() + ".")
    return " ".join(sentences)


def question(number: int, seed: int) -> str:
    """A question that no other number has."""
    return f"Question {number}: what is said above about {pseudo_text(8, f'{seed}/question/{number}').lower()[:-1]}?"
