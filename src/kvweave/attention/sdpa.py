"""torch's fused attention where its causal flag says exactly what the plan says; blocks of matrix products elsewhere.

A causal flag is right only for a view whose rows are its whole context in order (a cold prefill). For scattered rows, or
rows behind cached ones, it would show rows the future (docs/architecture.md, "Visibility"), so those take
``BlockedAttention`` on a CPU and an explicit mask on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvweave.attention.base import LayerOptions, ViewRows, hidden_mask
from kvweave.attention.blocked import BlockedAttention, PreparedView
from kvweave.kv.pool import KVPool


@dataclass(frozen=True)
class SdpaView:
    rows: ViewRows
    square: bool
    other: PreparedView
    masks: dict[int | None, Tensor]


class SdpaAttention:
    name = "sdpa"

    def __init__(self, block_rows: int = 128) -> None:
        self._blocked = BlockedAttention(block_rows)

    def prepare(self, views: Sequence[ViewRows], pool: KVPool) -> list[SdpaView]:
        return [
            SdpaView(v, _is_square(v), other, {}) for v, other in zip(views, self._blocked.prepare(views, pool), strict=True)
        ]

    def run(self, prepared: list[SdpaView], layer: int, queries: Tensor, pool: KVPool, options: LayerOptions) -> Tensor:
        spec = pool.layout.layers[layer]
        plain = options.softcap is None and options.sinks is None
        if len(prepared) == 1 and not self._fused(prepared[0], plain, options, pool):
            return self._blocked.run([prepared[0].other], layer, queries, pool, options)
        out = queries.new_empty(queries.shape[1], spec.num_heads, spec.value_dim)
        others = []
        for view in prepared:
            if not self._fused(view, plain, options, pool):
                others.append(view.other)
                continue
            keys, values = pool.read(layer, view.rows.context)
            mask = None if view.square and options.window is None else self._mask(view, pool, options.window)
            attended = scaled_dot_product_attention(
                queries[None, :, view.rows.start : view.rows.stop],
                keys[None],
                values[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=options.scaling,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )
            out[view.rows.start : view.rows.stop] = attended[0].transpose(0, 1)
        if others:
            rows = torch.cat([torch.arange(v.rows.start, v.rows.stop) for v in others]).to(out.device)
            out[rows] = self._blocked.run(others, layer, queries, pool, options)[rows]
        return out

    def _fused(self, view: SdpaView, plain: bool, options: LayerOptions, pool: KVPool) -> bool:
        if not plain:
            return False
        return pool.device.type != "cpu" or (view.square and options.window is None)

    def _mask(self, view: SdpaView, pool: KVPool, window: int | None) -> Tensor:
        if window not in view.masks:
            view.masks[window] = ~hidden_mask(view.rows, pool, window, 0, view.rows.context.size)
        return view.masks[window]


def _is_square(view: ViewRows) -> bool:
    n = view.stop - view.start
    return view.context.size == n and bool((view.visible == torch.arange(1, n + 1)).all())
