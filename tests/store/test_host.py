"""The host tier against an ordered dict."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvweave.core.keys import ChunkIdentity, ModelFingerprint, Scope
from kvweave.errors import InvalidOption, PinQuotaExceeded
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


def later() -> float:
    return time.time() + 1000


class Host(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = HostStore(10 * UNIT)
        self.model: OrderedDict[int, int] = OrderedDict()
        self.gone: set[int] = set()
        self.pinned: set[int] = set()

    def pinned_tokens(self) -> int:
        return sum(self.model[key] for key in self.pinned)

    @rule(key=KEYS, tokens=st.integers(1, 12))
    def put(self, key: int, tokens: int) -> None:
        stored = self.store.put(record(key, tokens))
        if key in self.model:
            assert stored
            self.model.move_to_end(key)
            return
        assert stored == (tokens + self.pinned_tokens() <= 10)
        if not stored:
            return
        while sum(self.model.values()) + tokens > 10:
            leaving = next(k for k in self.model if k not in self.pinned)
            del self.model[leaving]
            self.gone.add(leaving)
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
        self.pinned.clear()

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        assert self.store.remove([identity(key).key]) == (key in self.model)
        self.model.pop(key, None)
        self.pinned.discard(key)

    @rule(keys=st.sets(KEYS, max_size=3))
    def pin(self, keys: set[int]) -> None:
        wanted = [identity(key).key for key in keys]
        held = keys & self.model.keys()
        if held and sum(self.model[key] for key in held | self.pinned) > 5:
            with pytest.raises(PinQuotaExceeded):
                self.store.pin(wanted, later())
            return
        assert self.store.pin(wanted, later()) == {identity(key).key for key in held}
        self.pinned |= held

    @rule(keys=st.sets(KEYS, max_size=3))
    def unpin(self, keys: set[int]) -> None:
        assert self.store.unpin(identity(key).key for key in keys) == {identity(k).key for k in keys & self.pinned}
        self.pinned -= keys

    @rule(key=KEYS)
    def expire(self, key: int) -> None:
        """A record that isn't there is put, and is over at once."""
        if key not in self.model and self.pinned_tokens() < 10:
            self.put(key, 1)
            self.store.remove([identity(key).key])
            self.store.put(dataclasses.replace(record(key, 1), expires=time.time() - 1))
            assert self.store.find([identity(key)]) == [Miss("expired", "host")]
            del self.model[key]

    @invariant()
    def agrees(self) -> None:
        stats = self.store.stats()
        assert stats.records == len(self.model)
        assert stats.bytes == UNIT * sum(self.model.values()) <= stats.budget
        assert stats.pins == len(self.pinned)
        assert stats.pinned_bytes == self.store.pinned_bytes(SCOPE.tag) == UNIT * self.pinned_tokens()
        assert self.pinned <= self.model.keys()
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


def test_a_record_lives_until_the_later_of_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = HostStore(10 * UNIT), time.time()
    for seconds in (100.0, 300.0, 200.0):
        store.put(dataclasses.replace(record(1, 1), expires=now + seconds))
    monkeypatch.setattr(time, "time", lambda: now + 299)
    assert store.contains(identity(1))
    monkeypatch.setattr(time, "time", lambda: now + 300)
    assert not store.contains(identity(1))
    assert store.stats().records == 0
    assert store.find([identity(1)]) == [Miss("expired", "host")]
    store.put(record(1, 1))
    assert store.contains(identity(1)), "it may be stored anew"


def test_a_pin_ends_and_outlives_no_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now, other = HostStore(10 * UNIT), time.time(), Scope.of("u")
    for key in (1, 2):
        store.put(dataclasses.replace(record(key, 1), expires=now + 200))
    assert store.pin([identity(1).key], now + 100) == {identity(1).key}
    assert store.pin([identity(2).key], now + 1000) == {identity(2).key}
    assert (store.pinned_bytes(), store.pinned_bytes(other.tag)) == (2 * UNIT, 0)
    assert not store.put(record(3, 9)), "pins leave too little for it, and nothing leaves in vain"
    assert store.stats().records == 2
    monkeypatch.setattr(time, "time", lambda: now + 101)
    assert store.put(record(3, 9))
    assert [store.contains(identity(k)) for k in (1, 2, 3)] == [False, True, True]
    monkeypatch.setattr(time, "time", lambda: now + 201)
    assert store.pinned_bytes() == 0
    assert not store.contains(identity(2))


def test_erasing_a_tenant_covers_his_salts() -> None:
    store, salted, other = HostStore(10 * UNIT), SCOPE.narrowed("salt"), Scope.of("u").narrowed("salt")
    for scope in (SCOPE, salted, other):
        store.put(record(1, 1, scope))
    assert all(store.contains(identity(1, scope)) for scope in (SCOPE, salted, other)), "each has its own"
    assert store.erase(SCOPE.tag) == (2, 2 * UNIT)
    assert [store.contains(identity(1, scope)) for scope in (SCOPE, salted, other)] == [False, False, True]
