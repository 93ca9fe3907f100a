"""Blocks of rows against their visible context, as plain matrix products.

Grouped query heads become rows of one product per KV head, so keys are never repeated; only the columns whose visibility
differs inside a block are masked; columns behind a block's last row are not computed. On CPUs whose bf16 GEMM is much
faster than their fp32 one this beats the fused kernel, which converts to fp32 (measured by ``engine.tuning``).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvweave.attention.base import LayerOptions, ViewRows, hidden_mask
from kvweave.kv.pool import KVPool

_SEGMENTED_ROWS = 16  # so few rows read each run of a scattered context in place; more rows pay for one gathered copy
_SEGMENTED_RUNS = 8
_DECODE_CONTEXT = 2048  # columns up to which the fused kernel's one call beats two products per KV head for one row
_SPAN = 512  # columns by which rows of a block may differ ...
_MIN_ROWS = 32  # ... unless the block would be too small for an efficient product


@dataclass(frozen=True)
class Block:
    """Rows of one view that are multiplied together.

    They attend to the context entries [first, stop); entries [masked, stop) need ``hidden`` [rows, stop - masked].
    """

    start: int
    end: int
    first: int
    masked: int
    stop: int
    hidden: Tensor | None


@dataclass
class PreparedView:
    rows: ViewRows
    block_rows: int
    blocks: dict[int | None, list[Block]] = field(default_factory=dict)

    def for_window(self, window: int | None, pool: KVPool) -> list[Block]:
        """Blocks for layers with this sliding window; made on first use, shared by all such layers."""
        if window not in self.blocks:
            self.blocks[window] = [
                _make_block(self.rows, self.rows.start + a, self.rows.start + b, window, pool)
                for a, b in _cut(self.rows.visible.tolist(), self.block_rows)
            ]
        return self.blocks[window]

    def decoded(self, window: int | None, pool: KVPool) -> Block | None:
        """The block of a single row that sees a short run of its context without holes; None for all others."""
        if self.rows.stop - self.rows.start > 1:
            return None
        (block,) = self.for_window(window, pool)
        return block if block.hidden is None and block.stop - block.first <= _DECODE_CONTEXT else None


class BlockedAttention:
    name = "blocked"

    def __init__(self, block_rows: int = 256) -> None:
        self.block_rows = block_rows

    def prepare(self, views: Sequence[ViewRows], pool: KVPool) -> list[PreparedView]:
        return [PreparedView(v, self.block_rows) for v in views]

    def run(self, prepared: list[PreparedView], layer: int, queries: Tensor, pool: KVPool, options: LayerOptions) -> Tensor:
        spec = pool.layout.layers[layer]
        groups = spec.num_heads // spec.num_kv_heads
        queries = queries * options.scaling
        out = queries.new_empty(queries.shape[1], spec.num_heads, spec.value_dim)
        plain = options.softcap is None and options.sinks is None
        for view in prepared:
            if plain and (block := view.decoded(options.window, pool)) is not None:
                out[block.start] = _decode(queries[:, block.start], view.rows, block, layer, pool)
                continue
            segments = _segments(view.rows, layer, pool)
            for block in view.for_window(options.window, pool):
                rows = slice(block.start, block.end)
                for head in range(spec.num_kv_heads):  # one product per KV head: a batched one would copy K and V
                    heads = slice(head * groups, (head + 1) * groups)
                    q = queries[heads, rows].reshape(-1, spec.key_dim)
                    sinks = None if options.sinks is None else options.sinks[heads]
                    attended = _attend(q, [(o, k[head], v[head]) for o, k, v in segments], block, options.softcap, sinks)
                    out[rows, heads] = attended.view(groups, -1, spec.value_dim).transpose(0, 1)
        return out


def _decode(queries: Tensor, view: ViewRows, block: Block, layer: int, pool: KVPool) -> Tensor:
    """One row, ``queries`` [heads, dim] scaled already -> [heads, value_dim]: grouped heads are the kernel's rows."""
    keys, values = (kv[None, :, block.first : block.stop] for kv in pool.read(layer, view.context))
    grouped = queries.view(1, keys.shape[1], -1, queries.shape[-1])
    return scaled_dot_product_attention(grouped, keys, values, scale=1.0).reshape(queries.shape[0], -1)


def _cut(visible: list[int], block_rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges of the blocks: a block computes every column its last row sees, so scattered rows, which differ more
    in what they see, get smaller blocks."""
    start = 0
    while start < len(visible):
        end = min(start + block_rows, len(visible))
        reach = bisect.bisect_right(visible, visible[start] + _SPAN, lo=start, hi=end)
        end = min(end, max(reach, start + _MIN_ROWS))
        yield start, end
        start = end


def _make_block(view: ViewRows, start: int, end: int, window: int | None, pool: KVPool) -> Block:
    a, b = start - view.start, end - view.start
    everyone, stop = int(view.visible[a]), int(view.visible[b - 1])  # ascending: the first row sees the least
    if window is None:
        if everyone == stop:
            return Block(start, end, 0, stop, stop, None)
        rows = replace(view, visible=view.visible[a:b], positions=view.positions[a:b])
        return Block(start, end, 0, everyone, stop, hidden_mask(rows, pool, None, everyone, stop))
    rows = replace(view, visible=view.visible[a:b], positions=view.positions[a:b])
    hidden = hidden_mask(rows, pool, window, 0, stop)
    first = int((~hidden).any(0).int().argmax())
    hidden = hidden[:, first:]
    return Block(start, end, first, first, stop, hidden if bool(hidden.any()) else None)


def _segments(view: ViewRows, layer: int, pool: KVPool) -> list[tuple[int, Tensor, Tensor]]:
    """The context as (offset, K, V) pieces; one piece unless few rows make copying it the larger cost."""
    runs = view.context.runs
    if len(runs) == 1 or view.stop - view.start > _SEGMENTED_ROWS or len(runs) > _SEGMENTED_RUNS:
        return [(0, *pool.read(layer, view.context))]
    pieces, offset = [], 0
    for start, stop in runs:
        pieces.append((offset, pool.keys[layer][:, start:stop], pool.values[layer][:, start:stop]))
        offset += stop - start
    return pieces


def _attend(
    q: Tensor,
    segments: list[tuple[int, Tensor, Tensor]],
    block: Block,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one KV head: ``q`` [heads of the group * rows, dim], K and V [context, dim] -> [..., value_dim]."""
    parts = []
    for offset, keys, values in segments:
        a, b = max(block.first - offset, 0), min(block.stop - offset, keys.shape[0])
        if a < b:
            parts.append((keys[a:b], values[a:b]))
    scores = [torch.mm(q, keys.t()) for keys, _ in parts]
    weights = _weights(scores[0] if len(scores) == 1 else torch.cat(scores, -1), block, softcap, sinks)
    if len(parts) == 1:
        return torch.mm(weights, parts[0][1])
    pieces = weights.split([values.shape[0] for _, values in parts], dim=-1)
    return torch.stack([torch.mm(w, values) for w, (_, values) in zip(pieces, parts, strict=True)]).sum(0)


def _weights(scores: Tensor, block: Block, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax over the visible columns; ``scores`` [heads of the group * rows, columns] is overwritten."""
    dtype = scores.dtype
    if softcap is not None:
        scores = torch.tanh(scores.float() / softcap) * softcap
    rows = block.end - block.start
    if block.hidden is not None:
        scores.view(-1, rows, scores.shape[1])[..., block.masked - block.first :].masked_fill_(block.hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, -1).to(dtype)
    column = sinks.to(scores.dtype).repeat_interleave(rows)[:, None]
    return torch.softmax(torch.cat([scores, column], -1).float(), -1)[..., :-1].to(dtype)
