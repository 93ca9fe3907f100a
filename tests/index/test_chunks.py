"""Cutting and lookup."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.core.keys import ModelFingerprint
from kvweave.core.prompt import TokenPrompt
from kvweave.core.report import SegmentReport
from kvweave.errors import InvalidOption
from kvweave.index.chunks import ChunkIndex, Chunking, FoundChunk
from kvweave.store.base import ChunkRecord
from kvweave.store.host import HostStore
from kvweave.store.tiered import TieredStore
from tests.lab import doc, prompt_of

FINGERPRINT = ModelFingerprint.of(content="m")


@given(n=st.integers(0, 3000), size=st.integers(1, 600), least=st.integers(1, 600))
def test_pieces_cover_the_document_on_a_fixed_grid(n: int, size: int, least: int) -> None:
    if least > size:
        with pytest.raises(InvalidOption):
            Chunking(size, least)
        return
    pieces = Chunking(size, least).cut(n)
    if n < least:
        assert pieces == []
        return
    assert pieces[0][0] == 0
    assert pieces[-1][1] == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert all(start % size == 0 for start, _ in pieces)
    assert all(stop - start == size for start, stop in pieces[:-1])
    assert least <= pieces[-1][1] - pieces[-1][0] < size + least


def memory(budget: int = 2**20) -> TieredStore:
    return TieredStore(HostStore(budget))


def index(store: TieredStore, tenant: str = "t", fingerprint: ModelFingerprint = FINGERPRINT) -> ChunkIndex:
    return ChunkIndex(store, fingerprint, tenant, Chunking(32, 8))


def look(chunks: ChunkIndex, prompt: TokenPrompt) -> tuple[tuple[FoundChunk, ...], tuple[SegmentReport, ...]]:
    found = chunks.lookup(prompt, [(1,)])
    return found.chunks, found.segments


def fill(store: TieredStore, chunks: ChunkIndex, ids: list[int], anchor: tuple[int, ...], skip: int | None = None) -> None:
    for i, piece in enumerate(chunks.pieces(ids, anchor)):
        if i != skip:
            kv = (torch.zeros(1, 1, 1),)
            store.put(ChunkRecord(piece.identity, kv, kv))


def test_pieces_are_found_alone_and_borders_known() -> None:
    store = memory(2**20)
    chunks, ids = index(store), doc(100, 1)
    fill(store, chunks, ids, (1,), skip=1)
    found, (report,) = look(chunks, prompt_of([1, 2], ("doc", ids), [5]))
    assert [(f.start, f.stop, f.border) for f in found] == [(2, 34, True), (66, 102, True)]
    assert (report.result, report.reason) == ("partial", "never_seen")
    fill(store, chunks, ids, (1,))
    found, (report,) = look(chunks, prompt_of([1, 2], ("doc", ids), [5]))
    assert [f.border for f in found] == [True, False, False]
    assert [f.exact for f in found] == [False] * 3
    assert report.result == "hit"
    found, _ = look(chunks, prompt_of([1], ("doc", ids), [5]))
    assert [f.exact for f in found] == [True] * 3


def test_the_preferred_anchor_wins() -> None:
    store = memory(2**20)
    chunks, ids = index(store), doc(20, 1)
    fill(store, chunks, ids, (1,))
    prompt = prompt_of([7, 8], ("doc", ids), [5])
    assert [f.exact for f in chunks.lookup(prompt, [(7, 8), (1,)]).chunks] == [False]
    fill(store, chunks, ids, (7, 8))
    assert [f.exact for f in chunks.lookup(prompt, [(7, 8), (1,)]).chunks] == [True]


def test_other_model_tenant_or_ids_miss() -> None:
    store = memory(2**20)
    ids = doc(20, 1)
    fill(store, index(store), ids, (1,))
    prompt = prompt_of([1], ("doc", ids), [5])
    assert len(index(store).lookup(prompt, [(1,)]).chunks) == 1
    assert not index(store, tenant="u").lookup(prompt, [(1,)]).chunks
    assert not index(store, fingerprint=ModelFingerprint.of(content="n")).lookup(prompt, [(1,)]).chunks
    assert not index(store).lookup(prompt_of([1], ("doc", [*ids[:-1], 99]), [5]), [(1,)]).chunks


def test_a_colliding_key_is_a_miss() -> None:
    """T19: the ids in the record decide."""
    store = memory(2**20)
    chunks, ids = index(store), doc(20, 1)
    (piece,) = chunks.pieces(ids, (1,))
    other = dataclasses.replace(piece.identity, token_ids=(1, 2, 3))
    store.put(ChunkRecord(other, (torch.zeros(1, 1, 1),), (torch.zeros(1, 1, 1),)))
    found, (report,) = look(chunks, prompt_of([1], ("doc", ids), [5]))
    assert not found
    assert (report.result, report.reason) == ("miss", "tokens")


def test_reasons_of_a_miss() -> None:
    kv = (torch.zeros(1, 32, 4),)
    a, b = doc(32, 1), doc(32, 2)
    (piece,) = index(memory()).pieces(a, (1,))
    store = memory(ChunkRecord(piece.identity, kv, kv).num_bytes)
    chunks = index(store)
    for ids in (a, b):
        (piece,) = chunks.pieces(ids, (1,))
        store.put(ChunkRecord(piece.identity, kv, kv))
    prompt = prompt_of([1], ("doc", a), ("doc", b), ("doc", doc(32, 3)), ("doc", doc(5, 4)))
    _, reports = look(chunks, prompt)
    assert [(r.result, r.reason) for r in reports] == [
        ("miss", "evicted"),
        ("hit", None),
        ("miss", "never_seen"),
        ("miss", "below_min"),
    ]


def test_isolated_pieces_stand_behind_the_anchor_alone() -> None:
    chunks = ChunkIndex(memory(1), FINGERPRINT, "t", Chunking(32, 8, isolated_pieces=True))
    assert [p.anchor_ids for p in chunks.pieces(doc(70, 1), (1,))] == [(1,), (1,)]
    joint = index(memory(1))
    assert [len(p.anchor_ids) for p in joint.pieces(doc(70, 1), (1,))] == [1, 33]
