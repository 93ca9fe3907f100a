"""Exact prefix cache: a radix tree from token ids to slots.

Only exact KV enters. The tree owns one reference to each slot it holds; a matched request takes another, so a slot in
use is never evicted. What has outlived its time is as good as absent, what is pinned stays. Scopes (tenants) have separate
roots: no lookup crosses them, not even to tell existence.

The interface (``match``, ``insert``, ``evict``) is what a history-aware tree keeps: keys are sequences of token ids here.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
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
    expires: float = math.inf
    """Unix time."""
    pinned_until: float = 0.0
    """Unix time until which it isn't evicted; what is above it isn't either, because only leaves are."""
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixTree:
    """Radix tree with least-recently-used eviction of leaves. ``clock`` tells unix time."""

    def __init__(self, allocator: SlotAllocator, clock: Callable[[], float] = time.time) -> None:
        self._allocator = allocator
        self._time = clock
        self._roots: dict[str, _Node] = {}
        self._clock = itertools.count(1)
        self.num_tokens = 0

    def match(self, tokens: Sequence[int], scope: str) -> Tensor:
        """Slots of the longest cached prefix, int64 [m]. The caller takes its own reference before anything else runs."""
        path = self._path(tokens, scope)
        return torch.cat([node.slots for node in path]) if path else torch.empty(0, dtype=torch.int64)

    def insert(self, tokens: Sequence[int], slots: Tensor, scope: str, expires: float = math.inf) -> int:
        """Add exact KV for ``tokens`` [n] at ``slots`` [n]; takes a reference to those that are new, returns how many.

        Where the tree has a prefix already, it keeps its own slots for it. ``expires`` is a unix time; what is there already
        lives until the later of the two.
        """
        tokens = tuple(tokens)
        if len(tokens) != slots.numel():
            raise IntegrityError(f"{len(tokens)} tokens with {slots.numel()} slots can't enter the prefix tree")
        path = self._path(tokens, scope)
        for node in path:
            node.expires = max(node.expires, expires)
        at = sum(len(node.tokens) for node in path)
        new = len(tokens) - at
        if new:
            parent = path[-1] if path else self._roots.setdefault(scope, _Node((), torch.empty(0, dtype=torch.int64), None))
            self._allocator.share(slots[at:])
            node = _Node(tokens[at:], slots[at:].clone(), parent, next(self._clock), expires)
            parent.children[tokens[at]] = node
            self.num_tokens += new
        return new

    def _path(self, tokens: Sequence[int], scope: str) -> list[_Node]:
        """Nodes of the longest cached prefix, used now; the last one is split where the prefix ends inside it."""
        path: list[_Node] = []
        node, at, now = self._roots.get(scope), 0, self._time()
        while node is not None and at < len(tokens):
            child = node.children.get(tokens[at])
            if child is not None and child.expires <= now:
                self._drop(child)
                child = None
            if child is None:
                break
            n = _common(child.tokens, tokens, at)
            if n < len(child.tokens):
                child = self._split(child, n)  # so that the part nobody uses can still be evicted
            child.last_use = next(self._clock)
            path.append(child)
            at += n
            node = child
        return path

    def pin(self, tokens: Sequence[int], scope: str, until: float) -> int:
        """Keep the longest cached prefix until a unix time (0: no longer); returns its length."""
        path = self._path(tokens, scope)
        if path:
            path[-1].pinned_until = until
            for node in path:
                node.expires = max(node.expires, until)
        return sum(len(node.tokens) for node in path)

    def covered(self, tokens: Sequence[int], scope: str) -> int:
        """Tokens of the longest cached prefix; not a use of it."""
        node, at, now = self._roots.get(scope), 0, self._time()
        while node is not None and at < len(tokens):
            node = node.children.get(tokens[at])
            if node is None or node.expires <= now:
                break
            n = _common(node.tokens, tokens, at)
            at += n
            if n < len(node.tokens):
                break
        return at

    def pinned_tokens(self, scopes: str = "") -> int:
        """Tokens of pinned prefixes, in the scopes whose names start so."""
        now, seen, count = self._time(), set(), 0
        for name, root in self._roots.items():
            for node in _walk(root) if name.startswith(scopes) else ():
                above: _Node | None = node if node.pinned_until > now else None
                while above is not None and id(above) not in seen:
                    seen.add(id(above))
                    count += len(above.tokens)
                    above = above.parent
        return count

    def evict(self, wanted: int, *, pinned: bool = False) -> int:
        """Give up least recently used leaves until ``wanted`` slots became free or none is left; returns how many did.

        Leaves whose slots a request still uses are passed over: giving them up would free nothing. Pinned ones as well,
        unless ``pinned``.
        """
        now = self._time()
        heap = [(node.last_use, id(node), node) for node in self._leaves()]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < wanted:
            _, _, node = heapq.heappop(heap)
            if (node.pinned_until > now and not pinned) or (self._allocator.owners(node.slots) > 1).any():
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
        upper = _Node(node.tokens[:n], node.slots[:n], node.parent, node.last_use, node.expires)
        node.parent.children[node.tokens[0]] = upper
        upper.children[node.tokens[n]] = node
        node.tokens, node.slots, node.parent = node.tokens[n:], node.slots[n:], upper
        return upper

    def _drop(self, node: _Node) -> None:
        """Forget a node and everything below it."""
        for below in _walk(node):
            self._allocator.release(below.slots)
            self.num_tokens -= len(below.tokens)
        if node.parent is not None:
            del node.parent.children[node.tokens[0]]

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
