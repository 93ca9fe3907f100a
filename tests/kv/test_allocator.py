"""Slot ownership against a dict of counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvweave.errors import IntegrityError
from kvweave.kv.allocator import SlotAllocator


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real = SlotAllocator(40)
        self.owned: list[torch.Tensor] = []

    @rule(n=st.integers(0, 45))
    def allocate(self, n: int) -> None:
        before = self.real.num_free
        got = self.real.allocate(n)
        if n > before:
            assert got is None
            return
        assert got is not None
        assert got.numel() == n
        taken = {int(s) for o in self.owned for s in o}
        assert not taken & set(got.tolist())
        self.owned.append(got)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        slots = data.draw(st.sampled_from(self.owned))
        self.real.share(slots)
        self.owned.append(slots)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owned) - 1))
        self.real.release(self.owned.pop(index))

    @invariant()
    def counts_agree(self) -> None:
        self.real.check_integrity()
        counts = [0] * 40
        for slots in self.owned:
            for slot in slots.tolist():
                counts[slot] += 1
        assert self.real.owners(torch.arange(40)).tolist() == counts
        assert self.real.num_free == counts.count(0)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_contiguous_where_possible() -> None:
    slots = SlotAllocator(20)
    a, b, c = slots.allocate(5), slots.allocate(5), slots.allocate(5)
    assert a is not None
    assert b is not None
    assert c is not None
    slots.release(b)
    fits = slots.allocate(5)
    assert fits is not None
    assert fits.tolist() == b.tolist()  # the best fitting run, so that large ones stay whole
    slots.release(fits)
    scattered = slots.allocate(9)
    assert scattered is not None
    assert len(set(scattered.tolist())) == 9


def test_wrong_releases_are_refused() -> None:
    slots = SlotAllocator(4)
    a = slots.allocate(2)
    assert a is not None
    slots.release(a)
    with pytest.raises(IntegrityError):
        slots.release(a)
    with pytest.raises(IntegrityError):
        slots.share(a)
