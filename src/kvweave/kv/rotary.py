"""Rotation of keys and queries to positions, with the model file's own rotary functions.

Store keys are unrotated and pool keys are rotated: placing a chunk anywhere is one rotation, and gives the same bits
as computing it there. Rotations are never chained.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tables = Callable[[Tensor], tuple[Tensor, Tensor]]
"""positions [n] -> cos, sin, each [1, n, rotary_dim] in the model's dtype, any attention scaling included."""

Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q, k [1, heads, n, dim], cos, sin) -> rotated q, k: the model file's ``apply_rotary_pos_emb``."""


@dataclass(frozen=True)
class LayerRotary:
    """How one layer rotates. Layers with equal ``kind`` share their tables."""

    kind: Hashable
    tables: Tables
    apply: Apply


class Rotary:
    """Rotation for all layers of a model; ``layers[i]`` is None where layer i has no RoPE."""

    def __init__(self, layers: tuple[LayerRotary | None, ...]) -> None:
        self.layers = layers

    def at(self, positions: Tensor) -> PositionTables:
        """Tables for these positions, computed once per kind and reused by every layer."""
        return PositionTables(self, positions)


@dataclass
class PositionTables:
    """cos/sin for one list of positions [n]."""

    rotary: Rotary
    positions: Tensor
    _cache: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rotate(self, layer: int, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k [heads, n, dim] of ``layer`` to the positions; unchanged if the layer has no RoPE."""
        rotary = self.rotary.layers[layer]
        if rotary is None:
            return queries, keys
        cos, sin = self._tables(rotary)
        q, k = rotary.apply(queries[None], keys[None], cos, sin)
        return q[0], k[0]

    def rotate_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Rotate k [kv_heads, n, dim] alone."""
        return self.rotate(layer, keys[:0], keys)[1]

    def narrow(self, index: Tensor) -> PositionTables:
        """Tables of a subset of the positions."""
        cache = {kind: (cos[:, index], sin[:, index]) for kind, (cos, sin) in self._cache.items()}
        return PositionTables(self.rotary, self.positions[index], cache)

    def _tables(self, rotary: LayerRotary) -> tuple[Tensor, Tensor]:
        if rotary.kind not in self._cache:
            self._cache[rotary.kind] = rotary.tables(self.positions)
        return self._cache[rotary.kind]


def identity_like(cos: Tensor, sin: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """cos = 1, sin = 0 for ``rows`` rows: makes a layer hand over unrotated queries and keys."""
    return torch.ones_like(cos[:, :1]).expand(-1, rows, -1), torch.zeros_like(sin[:, :1]).expand(-1, rows, -1)
