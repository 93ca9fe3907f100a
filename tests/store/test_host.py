"""The host tier against an ordered dict."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvweave.core.keys import ChunkIdentity, ModelFingerprint, Scope
from kvweave.errors import InvalidOption
from kvweave.store.base import ChunkRecord, Miss
from kvweave.store.host import HostStore

MODEL, SCOPE = ModelFingerprint.of(content="m"), Scope.of("t")


def identity(key: int, scope: Scope = SCOPE) -> ChunkIdentity:
    """Without tokens, so that a record's bytes are those of its tensors."""
    return ChunkIdentity.of([], [key], MODEL, scope)


def record(key: int, tokens: int, scope: Scope = SCOPE) -> ChunkRecord:
    data = torch.full((1, tokens, 4), float(key))
    return ChunkRecord(identity(key, scope), (data,), (data,))


UNIT = record(0, 1).num_bytes
KEYS = st.integers(0, 9)


class Host(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = HostStore(10 * UNIT)
        self.model: OrderedDict[int, int] = OrderedDict()
        self.gone: set[int] = set()

    @rule(key=KEYS, tokens=st.integers(1, 12))
    def put(self, key: int, tokens: int) -> None:
        stored = self.store.put(record(key, tokens))
        if key in self.model:
            assert stored
            self.model.move_to_end(key)
            return
        assert stored == (tokens <= 10)
        if not stored:
            return
        while sum(self.model.values()) + tokens > 10:
            self.gone.add(self.model.popitem(last=False)[0])
        self.model[key] = tokens
        self.gone.discard(key)

    @rule(keys=st.lists(KEYS, max_size=5))
    def get(self, keys: list[int]) -> None:
        found = self.store.find([identity(k) for k in keys])
        assert [not isinstance(f, Miss) for f in found] == [k in self.model for k in keys]
        for key, hit in zip(keys, found, strict=True):
            if not isinstance(hit, Miss):
                keys_of, _ = hit.read(torch.tensor([0]), 0, 0, 1.0).layer(0)
                assert float(keys_of.max()) == key
                self.model.move_to_end(key)

    @rule()
    def erase(self) -> None:
        assert self.store.erase(SCOPE.tag) == (len(self.model), UNIT * sum(self.model.values()))
        assert self.store.erase(Scope.of("u").tag) == (0, 0)
        self.model.clear()
        self.gone.clear()

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        assert self.store.remove([identity(key).key]) == (key in self.model)
        self.model.pop(key, None)

    @invariant()
    def agrees(self) -> None:
        stats = self.store.stats()
        assert stats.records == len(self.model)
        assert stats.bytes == UNIT * sum(self.model.values()) <= stats.budget
        for key in range(10):
            assert self.store.contains(identity(key)) == (key in self.model)
            if key in self.gone:
                assert self.store.find([identity(key)]) == [Miss("evicted", "host")]


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_budget_below_zero_is_refused() -> None:
    with pytest.raises(InvalidOption):
        HostStore(-1)


def test_a_tenant_over_quota_evicts_its_own() -> None:
    store, other = HostStore(10 * UNIT, tenant_quota=4 * UNIT), Scope.of("u")
    assert store.put(record(1, 2, other))
    assert all(store.put(record(key, 2)) for key in (2, 3, 4))
    assert not store.put(record(5, 5))
    assert [store.contains(identity(k)) for k in (2, 3, 4, 5)] == [False, True, True, False]
    assert store.contains(identity(1, other))


def test_a_record_with_other_tokens_is_a_miss() -> None:
    store = HostStore(10 * UNIT)
    store.put(record(1, 1))
    wanted = dataclasses.replace(identity(1), token_ids=(9,))
    assert store.find([wanted]) == [Miss("tokens", "host")]
