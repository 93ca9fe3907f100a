"""The host tier against an ordered dict."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvweave.errors import InvalidOption
from kvweave.store.base import ChunkRecord
from kvweave.store.host import HostStore


def record(key: int, tokens: int) -> ChunkRecord:
    data = torch.full((1, tokens, 4), float(key))
    return ChunkRecord(bytes([key]), tuple([key] * tokens), (data,), (data,))


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
        found = self.store.get_many([bytes([k]) for k in keys])
        assert [f is not None for f in found] == [k in self.model for k in keys]
        for key, hit in zip(keys, found, strict=True):
            if hit is not None:
                assert float(hit.layer(0)[0].max()) == key
                self.model.move_to_end(key)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        assert self.store.remove([bytes([key])]) == (key in self.model)
        self.model.pop(key, None)

    @invariant()
    def agrees(self) -> None:
        stats = self.store.stats()
        assert stats.records == len(self.model)
        assert stats.bytes == UNIT * sum(self.model.values()) <= stats.budget
        for key in range(10):
            assert self.store.contains(bytes([key])) == (key in self.model)
            if key in self.gone:
                assert self.store.missing_reason(bytes([key])) == "evicted"


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_budget_below_zero_is_refused() -> None:
    with pytest.raises(InvalidOption):
        HostStore(-1)
