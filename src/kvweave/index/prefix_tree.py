"""Exact prefix cache: a radix tree from token ids to slots.

Only exact KV enters. The tree owns one reference to each slot it holds; a matched request takes another, so a slot in
use is never evicted. Scopes (tenants) have separate roots: no lookup crosses them, not even to tell existence.

The interface (``match``, ``insert``, ``evict``) is what a history-aware tree keeps: keys are sequences of token ids here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.errors import IntegrityError
from kvweave.kv.allocator import SlotAllocator


@dataclass(eq=False)
class _Node:
    tokens: tuple[int, ...]
    slots: Tensor
    parent: _Node | None
    last_use: int = 0
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixTree:
    """Radix tree with least-recently-used eviction of leaves."""

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        self._roots: dict[str, _Node] = {}
        self._clock = itertools.count(1)
        self.num_tokens = 0

    def match(self, tokens: Sequence[int], scope: str) -> Tensor:
        """Slots of the longest cached prefix, int64 [m]. The caller takes its own reference before anything else runs."""
        parts: list[Tensor] = []
        node, at = self._roots.get(scope), 0
        while node is not None and at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            n = _common(child.tokens, tokens, at)
            if n < len(child.tokens):
                child = self._split(child, n)  # so that the part nobody uses can still be evicted
            child.last_use = next(self._clock)
            parts.append(child.slots)
            at += n
            node = child
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def insert(self, tokens: Sequence[int], slots: Tensor, scope: str) -> int:
        """Add exact KV for ``tokens`` [n] at ``slots`` [n]; takes a reference to those that are new, returns how many.

        Where the tree has a prefix already, it keeps its own slots for it.
        """
        tokens = tuple(tokens)
        if len(tokens) != slots.numel():
            raise IntegrityError(f"{len(tokens)} tokens with {slots.numel()} slots can't enter the prefix tree")
        node, at = self._roots.setdefault(scope, _Node((), torch.empty(0, dtype=torch.int64), None)), 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            n = _common(child.tokens, tokens, at)
            if n < len(child.tokens):
                child = self._split(child, n)
            child.last_use = next(self._clock)
            at += n
            node = child
        new = len(tokens) - at
        if new:
            self._allocator.share(slots[at:])
            node.children[tokens[at]] = _Node(tokens[at:], slots[at:].clone(), node, next(self._clock))
            self.num_tokens += new
        return new

    def evict(self, wanted: int) -> int:
        """Give up least recently used leaves until ``wanted`` slots became free or none is left; returns how many did.

        Leaves whose slots a request still uses are passed over: giving them up would free nothing.
        """
        heap = [(node.last_use, id(node), node) for node in self._leaves()]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < wanted:
            _, _, node = heapq.heappop(heap)
            if (self._allocator.owners(node.slots) > 1).any():
                continue
            freed += len(node.tokens)
            parent = self._remove(node)
            if parent is not None and not parent.children and parent.parent is not None:
                heapq.heappush(heap, (parent.last_use, id(parent), parent))
        return freed

    def clear(self, scopes: str = "") -> int:
        """Forget everything of the scopes whose names start so (default: all); returns the number of tokens."""
        count = 0
        for scope in [s for s in self._roots if s.startswith(scopes)]:
            for node in _walk(self._roots.pop(scope)):
                self._allocator.release(node.slots)
                count += len(node.tokens)
        self.num_tokens -= count
        return count

    def slots_held(self) -> Tensor:
        """All slots of the tree, for integrity checks."""
        nodes = [n.slots for root in self._roots.values() for n in _walk(root)]
        return torch.cat(nodes) if nodes else torch.empty(0, dtype=torch.int64)

    def _leaves(self) -> Iterator[_Node]:
        for root in self._roots.values():
            yield from (n for n in _walk(root) if not n.children and n.parent is not None)

    def _split(self, node: _Node, n: int) -> _Node:
        """Cut ``node`` after ``n`` tokens; returns the new upper half."""
        assert node.parent is not None
        upper = _Node(node.tokens[:n], node.slots[:n], node.parent, node.last_use)
        node.parent.children[node.tokens[0]] = upper
        upper.children[node.tokens[n]] = node
        node.tokens, node.slots, node.parent = node.tokens[n:], node.slots[n:], upper
        return upper

    def _remove(self, node: _Node) -> _Node | None:
        self._allocator.release(node.slots)
        self.num_tokens -= len(node.tokens)
        if node.parent is not None:
            del node.parent.children[node.tokens[0]]
        return node.parent


def _walk(root: _Node) -> Iterator[_Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _common(edge: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
    n = 0
    limit = min(len(edge), len(tokens) - at)
    while n < limit and edge[n] == tokens[at + n]:
        n += 1
    return n
