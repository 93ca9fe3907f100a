"""The one attention primitive: rows attend to the part of an ordered slot list that their view shows them.

Visibility is decided by order (``visible``), rotation and sliding windows by position. A backend plans once for a set of
rows (``prepare``) and runs once per layer (``run``), as FlashInfer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvweave.kv.pool import KVPool, SlotIndex


@dataclass(frozen=True)
class ViewRows:
    """Rows [start, stop) of a step that share one context.

    ``visible`` [rows] int64 ascending: row i sees the first ``visible[i]`` slots. ``positions`` [rows] int64.
    """

    start: int
    stop: int
    context: SlotIndex
    visible: Tensor
    positions: Tensor


@dataclass(frozen=True)
class LayerOptions:
    """What the model's layer asks of attention. ``window`` in positions; ``sinks`` [heads] logits without a value."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    name: str

    def prepare(self, views: Sequence[ViewRows], pool: KVPool) -> Any:
        """Work that is the same for every layer with these rows: blocks, masks."""
        ...

    def run(self, prepared: Any, layer: int, queries: Tensor, pool: KVPool, options: LayerOptions) -> Tensor:
        """``queries`` [heads, rows, key_dim], rotated -> [rows, heads, value_dim]."""
        ...


def hidden_mask(view: ViewRows, pool: KVPool, window: int | None, start: int, stop: int) -> Tensor:
    """True where row i must not see context entry j: bool [rows, stop - start] for the columns [start, stop)."""
    device = pool.device
    columns = torch.arange(start, stop, device=device)
    hidden = columns[None] >= view.visible.to(device)[:, None]
    if window is not None:
        keys_at = pool.positions[view.context.slots[start:stop]]
        hidden |= view.positions.to(device)[:, None] - keys_at[None] >= window
    return hidden
