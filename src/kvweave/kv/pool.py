"""The KV pool: rotated keys and values of every slot, layer by layer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.core.spec import KVLayout

_MAX_RUNS = 16  # so many slices copy faster than a gather or scatter by index


@dataclass(frozen=True)
class SlotIndex:
    """A list of slots, with its contiguous runs found once so that every layer can use plain slices.

    ``runs`` [(start, stop), ...] in order; ``slots`` [n] int64 on the pool's device.
    """

    slots: Tensor
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, slots: Tensor, device: torch.device) -> SlotIndex:
        """``slots`` int64 [n] on the CPU."""
        if slots.numel() == 0:
            return cls(slots.to(device), ())
        breaks = (torch.nonzero(slots[1:] != slots[:-1] + 1).flatten() + 1).tolist()
        edges = [0, *breaks, slots.numel()]
        values = slots.tolist()
        runs = tuple((values[a], values[b - 1] + 1) for a, b in itertools.pairwise(edges))
        return cls(slots.to(device), runs)

    @property
    def size(self) -> int:
        return self.slots.numel()


class KVPool:
    """Keys (rotated) and values of ``num_slots`` tokens: per layer [kv_heads, num_slots, dim].

    Head-major, so that a contiguous context is a matrix per head that GEMM reads in place. A slot has one position,
    the same index in all layers. Memory is touched only when written.
    """

    def __init__(self, layout: KVLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.device = device
        self.keys = [self._empty(s.num_kv_heads, s.key_dim) for s in layout.layers]
        self.values = [self._empty(s.num_kv_heads, s.value_dim) for s in layout.layers]
        self.positions = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def _empty(self, heads: int, dim: int) -> Tensor:
        return torch.zeros(heads, self.num_slots, dim, dtype=self.layout.dtype, device=self.device)

    def write(self, layer: int, index: SlotIndex, keys: Tensor, values: Tensor) -> None:
        """Store K and V, each [kv_heads, n, dim], in the slots of ``index``."""
        for pool, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if len(index.runs) > _MAX_RUNS:
                pool.index_copy_(1, index.slots, new)
                continue
            at = 0
            for start, stop in index.runs:
                pool[:, start:stop] = new[:, at : at + stop - start]
                at += stop - start

    def read(self, layer: int, index: SlotIndex) -> tuple[Tensor, Tensor]:
        """K and V of the slots, each [kv_heads, n, dim]; views of the pool if the slots are contiguous."""
        keys, values = self.keys[layer], self.values[layer]
        if len(index.runs) == 1:
            start, stop = index.runs[0]
            return keys[:, start:stop], values[:, start:stop]
        if 1 < len(index.runs) <= _MAX_RUNS:
            return tuple(torch.cat([t[:, a:b] for a, b in index.runs], dim=1) for t in (keys, values))  # type: ignore[return-value]
        return keys.index_select(1, index.slots), values.index_select(1, index.slots)
