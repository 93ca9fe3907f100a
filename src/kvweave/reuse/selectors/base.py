"""Selectors: which reused rows are recomputed. ``choose`` is the only code that knows budgets."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(scores: Tensor, keep: int, *, always: Tensor | None = None) -> Tensor:
    """Indices (ascending) of the ``keep`` highest scores; ties go to the earlier index.

    Args:
        scores: [n] fp32, higher = recompute sooner.
        keep: how many, at most n.
        always: [n] bool, entries taken first whatever their score; they count towards ``keep``, and if there are more
            of them than ``keep`` all of them are still taken.
    """
    ranked = scores.double()
    forced = 0
    if always is not None:
        forced = int(always.sum())
        ranked = ranked.masked_fill(always, float("inf"))
    order = torch.argsort(ranked, descending=True, stable=True)
    return order[: min(max(keep, forced), scores.numel())].sort().values
