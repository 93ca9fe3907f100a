"""Cutting and lookup."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.core.keys import ModelFingerprint
from kvweave.errors import InvalidOption
from kvweave.index.chunks import ChunkIndex, Chunking
from kvweave.store.base import ChunkRecord
from kvweave.store.host import HostStore
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


def index(store: HostStore, tenant: str = "t", fingerprint: ModelFingerprint = FINGERPRINT) -> ChunkIndex:
    return ChunkIndex(store, fingerprint, tenant, Chunking(32, 8))


def fill(store: HostStore, chunks: ChunkIndex, ids: list[int], anchor: tuple[int, ...], skip: int | None = None) -> None:
    for i, piece in enumerate(chunks.pieces(ids, anchor)):
        if i != skip:
            kv = (torch.zeros(1, 1, 1),)
            store.put(ChunkRecord(piece.key, piece.token_ids, kv, kv, birth=len(piece.anchor_ids)))


def test_pieces_are_found_alone_and_borders_known() -> None:
    store = HostStore(2**20)
    chunks, ids = index(store), doc(100, 1)
    fill(store, chunks, ids, (1,), skip=1)
    found, (report,) = chunks.lookup(prompt_of([1, 2], ("doc", ids), [5]), [(1,)])
    assert [(f.start, f.stop, f.border) for f in found] == [(2, 34, True), (66, 102, True)]
    assert (report.result, report.reason) == ("partial", "never_seen")
    fill(store, chunks, ids, (1,))
    found, (report,) = chunks.lookup(prompt_of([1, 2], ("doc", ids), [5]), [(1,)])
    assert [f.border for f in found] == [True, False, False]
    assert [f.exact for f in found] == [False] * 3
    assert report.result == "hit"
    found, _ = chunks.lookup(prompt_of([1], ("doc", ids), [5]), [(1,)])
    assert [f.exact for f in found] == [True] * 3


def test_the_preferred_anchor_wins() -> None:
    store = HostStore(2**20)
    chunks, ids = index(store), doc(20, 1)
    fill(store, chunks, ids, (1,))
    prompt = prompt_of([7, 8], ("doc", ids), [5])
    assert [f.exact for f in chunks.lookup(prompt, [(7, 8), (1,)])[0]] == [False]
    fill(store, chunks, ids, (7, 8))
    assert [f.exact for f in chunks.lookup(prompt, [(7, 8), (1,)])[0]] == [True]


def test_other_model_tenant_or_ids_miss() -> None:
    store = HostStore(2**20)
    ids = doc(20, 1)
    fill(store, index(store), ids, (1,))
    prompt = prompt_of([1], ("doc", ids), [5])
    assert len(index(store).lookup(prompt, [(1,)])[0]) == 1
    assert not index(store, tenant="u").lookup(prompt, [(1,)])[0]
    assert not index(store, fingerprint=ModelFingerprint.of(content="n")).lookup(prompt, [(1,)])[0]
    assert not index(store).lookup(prompt_of([1], ("doc", [*ids[:-1], 99]), [5]), [(1,)])[0]


def test_a_colliding_key_is_a_miss() -> None:
    """T19: the ids in the record decide."""
    store = HostStore(2**20)
    chunks, ids = index(store), doc(20, 1)
    (piece,) = chunks.pieces(ids, (1,))
    store.put(ChunkRecord(piece.key, (1, 2, 3), (torch.zeros(1, 1, 1),), (torch.zeros(1, 1, 1),)))
    found, (report,) = chunks.lookup(prompt_of([1], ("doc", ids), [5]), [(1,)])
    assert not found
    assert report.result == "miss"


def test_reasons_of_a_miss() -> None:
    one = ChunkRecord(b"", tuple(range(32)), (torch.zeros(1, 32, 4),), (torch.zeros(1, 32, 4),)).num_bytes
    store = HostStore(one)
    chunks, a, b = index(store), doc(32, 1), doc(32, 2)
    for ids in (a, b):
        (piece,) = chunks.pieces(ids, (1,))
        store.put(ChunkRecord(piece.key, piece.token_ids, (torch.zeros(1, 32, 4),), (torch.zeros(1, 32, 4),)))
    prompt = prompt_of([1], ("doc", a), ("doc", b), ("doc", doc(32, 3)), ("doc", doc(5, 4)))
    _, reports = chunks.lookup(prompt, [(1,)])
    assert [(r.result, r.reason) for r in reports] == [
        ("miss", "evicted"),
        ("hit", None),
        ("miss", "never_seen"),
        ("miss", "below_min"),
    ]


def test_isolated_pieces_stand_behind_the_anchor_alone() -> None:
    chunks = ChunkIndex(HostStore(1), FINGERPRINT, "t", Chunking(32, 8, isolated_pieces=True))
    assert [p.anchor_ids for p in chunks.pieces(doc(70, 1), (1,))] == [(1,), (1,)]
    joint = index(HostStore(1))
    assert [len(p.anchor_ids) for p in joint.pieces(doc(70, 1), (1,))] == [1, 33]
