"""The prefix tree against a dict model."""

from __future__ import annotations

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvweave.index.prefix_tree import PrefixTree
from kvweave.kv.allocator import SlotAllocator

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
SCOPES = st.sampled_from(["a", "b"])


class Tree(RuleBasedStateMachine):
    """Every (scope, prefix) has at most one slot; a match is the longest run of known prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(120)
        self.tree = PrefixTree(self.slots)
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.pinned: list[torch.Tensor] = []

    def known(self, tokens: list[int], scope: str) -> list[int]:
        out = []
        for n in range(1, len(tokens) + 1):
            slot = self.model.get((scope, tuple(tokens[:n])))
            if slot is None:
                break
            out.append(slot)
        return out

    @rule(tokens=TOKENS, scope=SCOPES)
    def insert(self, tokens: list[int], scope: str) -> None:
        mine = self.slots.allocate(len(tokens))
        if mine is None:
            return
        have = len(self.known(tokens, scope))
        assert self.tree.insert(tokens, mine, scope) == len(tokens) - have
        for n in range(have, len(tokens)):
            self.model[scope, tuple(tokens[: n + 1])] = int(mine[n])
        self.slots.release(mine)

    @rule(tokens=TOKENS, scope=SCOPES)
    def covered(self, tokens: list[int], scope: str) -> None:
        assert self.tree.covered(tokens, scope) == len(self.known(tokens, scope))

    @rule(tokens=TOKENS, scope=SCOPES, pin=st.booleans())
    def match(self, tokens: list[int], scope: str, pin: bool) -> None:
        got = self.tree.match(tokens, scope)
        assert got.tolist() == self.known(tokens, scope)
        if pin and got.numel():
            self.slots.share(got)
            self.pinned.append(got)

    @rule(wanted=st.integers(1, 30))
    def evict(self, wanted: int) -> None:
        in_use = {int(s) for p in self.pinned for s in p} & set(self.tree.slots_held().tolist())
        before = self.slots.num_free
        freed = self.tree.evict(wanted)
        assert self.slots.num_free == before + freed
        held = set(self.tree.slots_held().tolist())
        assert in_use <= held
        if freed < wanted:
            prefixes = [t for (s, t), slot in self.model.items() if slot in held and slot not in in_use]
            longest_used = [t for (s, t), slot in self.model.items() if slot in in_use]
            assert all(any(u[: len(p)] == p for u in longest_used) for p in prefixes)
        self.model = {k: slot for k, slot in self.model.items() if slot in held}

    @rule(scope=SCOPES)
    def clear(self, scope: str) -> None:
        assert self.tree.clear(scope) == sum(1 for s, _ in self.model if s == scope)
        self.model = {k: v for k, v in self.model.items() if k[0] != scope}

    @rule()
    def unpin(self) -> None:
        for slots in self.pinned:
            self.slots.release(slots)
        self.pinned = []

    @invariant()
    def integrity(self) -> None:
        self.slots.check_integrity()
        assert sorted(self.tree.slots_held().tolist()) == sorted(self.model.values())
        assert self.tree.num_tokens == len(self.model)


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def tree_at(now: list[float]) -> PrefixTree:
    return PrefixTree(SlotAllocator(64), lambda: now[0])


def put(tree: PrefixTree, tokens: list[int], expires: float = math.inf) -> None:
    slots = tree._allocator.allocate(len(tokens))
    assert slots is not None
    tree.insert(tokens, slots, "a", expires)
    tree._allocator.release(slots)


def test_what_has_outlived_its_time_is_gone_and_free() -> None:
    now = [0.0]
    tree = tree_at(now)
    put(tree, [1, 2, 3, 4], expires=10)
    put(tree, [1, 2, 9], expires=20)
    assert tree.match([1, 2, 3, 4], "a").numel() == 4
    now[0] = 10
    assert tree.match([1, 2, 3, 4], "a").numel() == 2, "the part that was used again lives on"
    now[0] = 20
    assert tree.match([1, 2, 9], "a").numel() == 0
    assert tree.num_tokens == 0
    assert tree._allocator.num_free == 64


def test_pinned_prefixes_stay_until_their_time_is_over() -> None:
    now = [0.0]
    tree = tree_at(now)
    put(tree, [1, 2, 3, 4])
    put(tree, [5, 6])
    assert tree.pin([1, 2, 3], "a", until=100) == 3
    assert tree.pinned_tokens() == 3
    assert tree.evict(64) == 3, "the tail behind the pin, and the other one"
    assert tree.match([1, 2, 3, 4], "a").numel() == 3
    now[0] = 100
    assert tree.pinned_tokens() == 0
    assert tree.evict(64) == 3


def test_pins_are_lifted_and_overruled() -> None:
    tree = tree_at([0.0])
    put(tree, [1, 2, 3])
    tree.pin([1, 2, 3], "a", until=100)
    tree.pin([1, 2, 3], "a", until=0)
    assert tree.evict(1) == 3
    put(tree, [1, 2, 3])
    tree.pin([1, 2, 3], "a", until=100)
    assert tree.evict(1) == 0
    assert tree.evict(1, pinned=True) == 3


def test_looking_is_not_a_use() -> None:
    slots, now = SlotAllocator(8), [0.0]
    tree = PrefixTree(slots, lambda: now[0])
    for tokens in ([1, 2], [3, 4]):
        mine = slots.allocate(2)
        assert mine is not None
        tree.insert(tokens, mine, "a", expires=10.0)
        slots.release(mine)
    assert tree.covered([1, 2, 9], "a") == 2
    tree.evict(1)
    assert (tree.covered([1, 2], "a"), tree.covered([3, 4], "a")) == (0, 2)  # the one that was looked at went first
    now[0] = 10.0
    assert tree.covered([3, 4], "a") == 0
