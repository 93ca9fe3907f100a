"""The workloads: which text the prompts of a run share, and where it stands in them.

A workload is a list of sessions, a session a list of turns that are sent one after the other. What has to be known to the
server before the measured part begins is in ``prime``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvweave.bench.texts import Document, Library, question
from kvweave.bench.traces import Query
from kvweave.errors import InvalidOption, suggest


@dataclass(frozen=True)
class Turn:
    """One user message: documents, then the question."""

    question: str
    documents: tuple[Document, ...] = ()


Session = tuple[Turn, ...]


@dataclass(frozen=True)
class Workload:
    """``prime`` is sent first, in order, and not measured."""

    name: str
    sessions: tuple[Session, ...]
    prime: tuple[Session, ...] = ()

    @property
    def requests(self) -> int:
        return sum(len(session) for session in self.sessions)


@dataclass(frozen=True)
class Shape:
    """Sizes of a workload. ``sets``: different groups of documents; ``turns``: of one conversation."""

    requests: int
    documents: int
    sets: int = 1
    turns: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "documents", "sets", "turns"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"--{name} is {getattr(self, name)}. Use 1 or more.")

    def turn(self, number: int, documents: Iterable[Document] = ()) -> Turn:
        return Turn(question(number, self.seed), tuple(documents))


def fresh(shape: Shape, library: Library) -> Workload:
    """No prompt shares a document with another."""
    return Workload("fresh", tuple((shape.turn(n, library.take(shape.documents)),) for n in range(shape.requests)))


def repeat(shape: Shape, library: Library) -> Workload:
    """The same prompts again and again."""
    prompts = [(shape.turn(n, library.take(shape.documents)),) for n in range(shape.sets)]
    return Workload("repeat", tuple(itertools.islice(itertools.cycle(prompts), shape.requests)), tuple(prompts))


def permuted(shape: Shape, library: Library) -> Workload:
    """The same documents in a new order each time, a new question at the end."""
    chance = random.Random(shape.seed)
    sets = [library.take(shape.documents) for _ in range(shape.sets)]
    orders = [_orders(documents, chance) for documents in sets]
    sessions = [(shape.turn(n, next(orders[n % shape.sets])),) for n in range(shape.requests)]
    return Workload("permuted", tuple(sessions), _known(shape, sets))


def dropped(shape: Shape, library: Library) -> Workload:
    """Known prompts with one document left out; no prompt comes twice, so there are more ``sets`` where it takes them."""
    if shape.documents < 2:
        raise InvalidOption("The workload dropped leaves one document out. Use --documents 2 or more.")
    count = max(shape.sets, -(-shape.requests // shape.documents))
    sets = [library.take(shape.documents) for _ in range(count)]
    sessions = []
    for n in range(shape.requests):
        documents, gone = sets[n % count], n // count
        sessions.append((shape.turn(n, documents[:gone] + documents[gone + 1 :]),))
    return Workload("dropped", tuple(sessions), _known(shape, sets))


def chat(shape: Shape, library: Library) -> Workload:
    """Conversations that grow: documents and a question, then one question a turn; answers stay in the history."""
    sessions = []
    for start in range(0, shape.requests, shape.turns):
        first, *later = range(start, min(start + shape.turns, shape.requests))
        opening = shape.turn(first, library.take(shape.documents))
        sessions.append((opening, *(shape.turn(n) for n in later)))
    return Workload("chat", tuple(sessions))


WORKLOADS: dict[str, Callable[[Shape, Library], Workload]] = {
    build.__name__: build for build in (fresh, repeat, permuted, dropped, chat)
}
TRACE = "trace"
NAMES = (*WORKLOADS, TRACE)


def from_trace(queries: Iterable[Query], seed: int) -> Workload:
    """One request a query, in the order of the trace. Nothing is primed: what repeats is what the trace repeats."""
    return Workload(TRACE, tuple((Turn(q.question or question(n, seed), q.documents),) for n, q in enumerate(queries)))


def build(name: str, shape: Shape, library: Library) -> Workload:
    """Raises ``InvalidOption`` for an unknown name, or sizes that the workload can't have."""
    if name not in WORKLOADS:
        raise InvalidOption(f"--workload '{name}' is unknown. {suggest(name, NAMES)}")
    return WORKLOADS[name](shape, library)


def _known(shape: Shape, sets: Sequence[tuple[Document, ...]]) -> tuple[Session, ...]:
    return tuple((shape.turn(shape.requests + n, documents),) for n, documents in enumerate(sets))


def _orders(documents: tuple[Document, ...], chance: random.Random) -> Iterator[tuple[Document, ...]]:
    """Every order once before any comes again; the given one counts as seen."""
    seen = {documents}
    while True:
        if len(seen) == math.factorial(len(documents)):
            seen.clear()
        order = tuple(chance.sample(documents, len(documents)))
        if order not in seen:
            seen.add(order)
            yield order
