"""The oracle: one dense softmax in fp32 with an explicit mask per row. Slow, obvious, complete."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.attention.base import LayerOptions, ViewRows, hidden_mask
from kvweave.kv.pool import KVPool


class ReferenceAttention:
    name = "reference"

    def prepare(self, views: Sequence[ViewRows], pool: KVPool) -> tuple[ViewRows, ...]:
        return tuple(views)

    def run(
        self, prepared: tuple[ViewRows, ...], layer: int, queries: Tensor, pool: KVPool, options: LayerOptions
    ) -> Tensor:
        spec = pool.layout.layers[layer]
        out = queries.new_zeros(queries.shape[1], spec.num_heads, spec.value_dim)
        for view in prepared:
            keys, values = (x.float() for x in pool.read(layer, view.context))  # [kv_heads, context, dim]
            group = spec.num_heads // spec.num_kv_heads
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            scores = queries[:, view.start : view.stop].float() @ keys.transpose(1, 2) * options.scaling
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            hidden = hidden_mask(view, pool, options.window, 0, view.context.size)
            scores = scores.masked_fill(hidden[None], float("-inf"))  # [heads, rows, context]
            if options.sinks is not None:
                sinks = options.sinks.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
                weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out[view.start : view.stop] = (weights @ values).transpose(0, 1).to(out.dtype)
        return out
