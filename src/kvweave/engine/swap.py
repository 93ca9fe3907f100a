"""KV of preempted requests in host memory, bit for bit: they go on where they were, without computing anything again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.kv.pool import KVPool, SlotIndex


@dataclass(frozen=True)
class Swapped:
    """Rotated keys and values of n tokens, per layer [kv_heads, n, dim], and their positions [n]; all on the CPU."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Tensor
    size: int
    """Bytes."""


class SwapSpace:
    """At most ``budget`` bytes of swapped KV. Used by the engine's thread alone."""

    def __init__(self, pool: KVPool, budget: int) -> None:
        self._pool = pool
        self.budget = budget
        self.used = 0

    def out(self, slots: Tensor) -> Swapped | None:
        """Copy the KV at ``slots`` [n]; None if the budget doesn't allow it."""
        size = slots.numel() * self._pool.layout.bytes_per_token
        if self.used + size > self.budget:
            return None
        index = SlotIndex.of(slots, self._pool.device)
        keys, values = [], []
        for layer in range(self._pool.layout.num_layers):
            k, v = self._pool.read(layer, index)
            keys.append(k.to("cpu", copy=True))
            values.append(v.to("cpu", copy=True))
        self.used += size
        return Swapped(tuple(keys), tuple(values), self._pool.positions[index.slots].cpu(), size)

    @torch.inference_mode()
    def back(self, swapped: Swapped, slots: Tensor) -> None:
        """Copy it to ``slots`` [n], and forget it."""
        device = self._pool.device
        index = SlotIndex.of(slots, device)
        for layer, (keys, values) in enumerate(zip(swapped.keys, swapped.values, strict=True)):
            self._pool.write(layer, index, keys.to(device), values.to(device))
        self._pool.positions[index.slots] = swapped.positions.to(device)
        self.drop(swapped)

    def drop(self, swapped: Swapped) -> None:
        """It isn't wanted any more."""
        self.used -= swapped.size
