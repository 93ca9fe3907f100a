"""Shapes of one model's KV cache, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerSpec:
    """KV geometry of one decoder layer.

    ``rotates`` is False for layers without RoPE (NoPE). ``window`` is the sliding window in positions (a row at
    position p sees keys at positions > p - window), None for full attention.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotates: bool = True
    window: int | None = None


@dataclass(frozen=True)
class KVLayout:
    """KV geometry of a model: one ``LayerSpec`` per layer and the dtype keys and values are kept in."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return sum(s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.layers) * self.dtype.itemsize

    @property
    def first_full_layer(self) -> int:
        """Index of the first layer without a sliding window; ``num_layers`` if there is none."""
        return next((i for i, s in enumerate(self.layers) if s.window is None), self.num_layers)
