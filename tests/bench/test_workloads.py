"""What repeats in a workload is what its name says, and nothing else does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.bench.texts import FileTexts, PseudoTexts, pseudo_text
from kvweave.bench.traces import zipf_trace
from kvweave.bench.workloads import WORKLOADS, Session, Shape, Workload, build, from_trace
from kvweave.documents import DocumentFile
from kvweave.errors import InvalidOption

SHAPES = st.builds(
    Shape,
    requests=st.integers(1, 14),
    documents=st.integers(2, 5),
    sets=st.integers(1, 4),
    turns=st.integers(1, 5),
    seed=st.integers(0, 3),
)


def make(name: str, shape: Shape) -> Workload:
    return build(name, shape, PseudoTexts(20, shape.seed))


def ids(session: Session) -> tuple[str, ...]:
    return tuple(document.id for turn in session for document in turn.documents)


def questions(sessions: Sequence[Session]) -> list[str]:
    return [turn.question for session in sessions for turn in session]


@pytest.mark.parametrize("name", WORKLOADS)
@given(shape=SHAPES)
@settings(max_examples=20, deadline=None)
def test_a_seed_fixes_everything_and_the_number_of_requests_is_kept(name: str, shape: Shape) -> None:
    workload = make(name, shape)
    assert workload == make(name, shape)
    assert workload.requests == shape.requests
    other = Shape(shape.requests, shape.documents, shape.sets, shape.turns, seed=9)
    texts = {d.text for session in workload.sessions for turn in session for d in turn.documents}
    assert not texts & {d.text for session in make(name, other).sessions for turn in session for d in turn.documents}


@given(SHAPES)
def test_fresh_repeats_nothing(shape: Shape) -> None:
    workload = make("fresh", shape)
    used = [id for session in workload.sessions for id in ids(session)]
    assert len(used) == len(set(used)) == shape.requests * shape.documents
    assert not workload.prime


@given(SHAPES)
def test_repeat_sends_nothing_that_was_not_primed(shape: Shape) -> None:
    workload = make("repeat", shape)
    assert set(workload.sessions) <= set(workload.prime)
    assert len(set(workload.prime)) == shape.sets


@given(SHAPES)
def test_permuted_has_primed_documents_in_orders_that_never_came(shape: Shape) -> None:
    workload = make("permuted", shape)
    primed = [ids(session) for session in workload.prime]
    assert {frozenset(ids(s)) for s in workload.sessions} <= {frozenset(one) for one in primed}
    if shape.requests <= shape.sets * (math.factorial(shape.documents) - 1):
        orders = [*primed, *(ids(session) for session in workload.sessions)]
        assert len(set(orders)) == len(orders)
    assert len(set(questions(workload.sessions))) == shape.requests


@given(SHAPES)
def test_dropped_leaves_out_one_document_of_a_primed_prompt_and_never_the_same_twice(shape: Shape) -> None:
    workload = make("dropped", shape)
    primed = [ids(session) for session in workload.prime]
    for session in workload.sessions:
        short = ids(session)
        assert len(short) == shape.documents - 1
        assert any(tuple(id for id in full if id in short) == short for full in primed)
    assert len({ids(session) for session in workload.sessions}) == shape.requests


@given(SHAPES)
def test_conversations_bring_documents_in_their_first_turn(shape: Shape) -> None:
    workload = make("chat", shape)
    assert [len(session) for session in workload.sessions[:-1]] == [shape.turns] * (len(workload.sessions) - 1)
    for session in workload.sessions:
        assert [len(turn.documents) for turn in session] == [shape.documents] + [0] * (len(session) - 1)
    assert len(set(questions(workload.sessions))) == shape.requests


def test_one_document_has_one_order() -> None:
    assert len({ids(session) for session in make("permuted", Shape(3, 1)).sessions}) == 1


@given(st.integers(1, 12), st.integers(1, 3), st.integers(4, 10), st.integers(0, 3))
def test_a_zipf_trace_never_brings_a_combination_twice(requests: int, documents: int, pool: int, seed: int) -> None:
    if requests > math.comb(pool, documents):
        return
    try:
        queries = zipf_trace(PseudoTexts(5, seed), requests, documents, pool, seed)
    except InvalidOption:
        assert requests > math.comb(pool, documents) // 2, "only a nearly used up pool may give up"
        return
    combinations = [frozenset(document.id for document in query.documents) for query in queries]
    assert len(set(combinations)) == requests
    assert all(len(one) == documents for one in combinations)


def test_favourites_come_more_often() -> None:
    queries = zipf_trace(PseudoTexts(5, 0), 300, 3, 50, 0)
    counts = [sum(any(d.id == f"text-{n}" for d in query.documents) for query in queries) for n in (0, 49)]
    assert counts[0] > 3 * counts[1]
    assert from_trace(queries, 0).requests == 300


def test_a_trace_that_runs_out_of_combinations_says_so() -> None:
    with pytest.raises(InvalidOption, match="--pool"):
        zipf_trace(PseudoTexts(5, 0), 4, 2, 3, 0)
    with pytest.raises(InvalidOption, match="--pool is 2"):
        zipf_trace(PseudoTexts(5, 0), 1, 3, 2, 0)


def test_documents_of_files_are_handed_out_once() -> None:
    library = FileTexts([DocumentFile(f"d{n}", None, f"Text {n}.", Path("x")) for n in range(5)])
    assert [document.id for document in itertools.chain(library.take(2), library.take(3))] == ["d0", "d1", "d2", "d3", "d4"]
    with pytest.raises(InvalidOption, match="hold 5"):
        library.take(1)


@given(st.integers(2, 400), st.integers())
def test_pseudo_text_has_the_length_asked_for(tokens: int, seed: int) -> None:
    text = pseudo_text(tokens, str(seed))
    assert abs(len(text.split()) + text.count(".") - tokens) <= 1
    assert text == pseudo_text(tokens, str(seed))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("permutd", {}, "permuted"), ("dropped", {"documents": 1}, "2 or more"), ("fresh", {"sets": 0}, "--sets is 0")],
)
def test_what_cannot_be_made_is_refused(name: str, shape: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        make(name, Shape(**{"requests": 2, "documents": 2, **shape}))
