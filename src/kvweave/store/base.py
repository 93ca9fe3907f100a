"""What a store of chunk KV is. Stores hold CPU tensors; they know nothing of models, requests or positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.core.keys import ChunkKey


@dataclass(frozen=True)
class ChunkRecord:
    """The KV of one chunk at rest: unrotated keys, no position. Immutable; it implements ``core.plan.KVSource``.

    ``keys[l]`` and ``values[l]`` are [kv_heads, tokens, dim] on the CPU. ``birth`` is the position of the first token
    when it was computed (used by the negative control ``raw`` alone).
    """

    key: ChunkKey
    token_ids: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    birth: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values)) + 4 * len(self.token_ids)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer], self.values[layer]


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened; ``bytes`` and ``records`` are what it holds now."""

    records: int
    bytes: int
    budget: int
    hits: int
    misses: int
    evictions: int
    refused: int
    """Records larger than the whole budget, which were not stored."""


class ChunkStore(Protocol):
    """One tier, or several composed into one."""

    def get_many(self, keys: Sequence[ChunkKey]) -> list[ChunkRecord | None]:
        """Each key on its own: a miss never hides a later hit."""
        ...

    def put(self, record: ChunkRecord) -> bool:
        """Store a record; False if it can't be held. A record that exists already is kept as it is."""
        ...

    def contains(self, key: ChunkKey) -> bool: ...

    def missing_reason(self, key: ChunkKey) -> str:
        """Why a key that isn't held isn't: ``never_seen`` or ``evicted``."""
        ...

    def remove(self, keys: Iterable[ChunkKey]) -> int:
        """Remove records; returns how many there were."""
        ...

    def stats(self) -> StoreStats: ...
