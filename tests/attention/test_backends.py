"""Kernels against the oracle over random views, windows, sinks and softcaps; one wrong mask bit is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.attention import BlockedAttention, LayerOptions, ReferenceAttention, SdpaAttention, ViewRows, make_backend
from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.errors import InvalidOption
from kvweave.kv.pool import KVPool, SlotIndex

CPU = torch.device("cpu")
SLOTS = 96


def make_pool(seed: int) -> KVPool:
    pool = KVPool(KVLayout((LayerSpec(6, 2, 8, 12),), torch.float32), SLOTS, CPU)
    generator = torch.Generator().manual_seed(seed)
    pool.keys[0].normal_(generator=generator)
    pool.values[0].normal_(generator=generator)
    return pool


def make_views(pool: KVPool, sizes: list[tuple[int, int]], seed: int, scattered: bool) -> list[ViewRows]:
    """Views of (context, rows): random rows of each context, positions with gaps."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SLOTS, generator=generator) if scattered else torch.arange(SLOTS)
    views, at, row = [], 0, 0
    for context, rows in sizes:
        mine = slots[at : at + context]
        positions = torch.randint(1, 4, (context,), generator=generator).cumsum(0)
        pool.positions[mine] = positions
        orders = torch.randperm(context, generator=generator)[:rows].sort().values
        views.append(ViewRows(row, row + rows, SlotIndex.of(mine, CPU), orders + 1, positions[orders]))
        at, row = at + context, row + rows
    return views


@given(
    sizes=st.lists(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=3),
    seed=st.integers(0, 100),
    scattered=st.booleans(),
    window=st.sampled_from([None, 1, 5, 40]),
    softcap=st.sampled_from([None, 3.0]),
    sinks=st.booleans(),
    block=st.sampled_from([1, 3, 128]),
)
@settings(max_examples=150, deadline=None)
def test_kernels_equal_the_oracle(
    sizes: list[tuple[int, int]],
    seed: int,
    scattered: bool,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    block: int,
) -> None:
    pool = make_pool(seed)
    views = make_views(pool, sizes, seed, scattered)
    queries = torch.randn(6, sum(r for _, r in sizes), 8, generator=torch.Generator().manual_seed(seed + 1))
    options = LayerOptions(0.3, window, softcap, torch.linspace(-1, 1, 6) if sinks else None)
    oracle = ReferenceAttention()
    expected = oracle.run(oracle.prepare(views, pool), 0, queries, pool, options)
    assert expected.shape == (queries.shape[1], 6, 12)
    for backend in (BlockedAttention(block), SdpaAttention(block)):
        got = backend.run(backend.prepare(views, pool), 0, queries, pool, options)  # type: ignore[arg-type]
        assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("row", [0, 7, 19])
def test_one_wrong_mask_bit_is_seen(row: int) -> None:
    """Negative control: one more visible entry for one row changes that row and no other."""
    pool = make_pool(0)
    (view,) = make_views(pool, [(40, 20)], 3, scattered=True)
    visible = view.visible.clone()
    if row == 19:
        visible[row] -= 1
    else:
        visible[row] = min(int(visible[row]) + 1, int(visible[row + 1]))
    if torch.equal(visible, view.visible):
        visible[row] -= 1
    queries = torch.randn(6, 20, 8, generator=torch.Generator().manual_seed(1))
    for backend in (ReferenceAttention(), BlockedAttention(), SdpaAttention()):
        outs = [
            backend.run(backend.prepare([v], pool), 0, queries, pool, LayerOptions(0.3))  # type: ignore[arg-type]
            for v in (view, replace(view, visible=visible))
        ]
        differs = (outs[0] - outs[1]).abs().amax((1, 2)) > 1e-4
        assert differs.tolist() == [i == row for i in range(20)]


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'sdpa'"):
        make_backend("spda")
