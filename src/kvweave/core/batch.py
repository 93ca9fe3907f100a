"""Plans -> one ragged batch: rows of all plans side by side, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.core.plan import RequestPlan
from kvweave.errors import PlanError


@dataclass(frozen=True)
class Batch:
    """Concatenated rows of several plans; rows of plan i are [offsets[i], offsets[i + 1])."""

    plans: tuple[RequestPlan, ...]
    offsets: tuple[int, ...]
    token_ids: Tensor
    """[n] int64"""
    positions: Tensor
    """[n] int64"""
    slots: Tensor
    """[n] int64"""


def build_batch(plans: Sequence[RequestPlan]) -> Batch:
    """Concatenate plans. Raises ``PlanError`` if two of them write the same slot."""
    offsets = [0]
    for plan in plans:
        offsets.append(offsets[-1] + plan.num_rows)
    written = torch.cat([plan.slots for plan in plans] + [load.slots for plan in plans for load in plan.loads])
    if len(plans) > 1:
        _check_disjoint(plans, written)
    return Batch(
        plans=tuple(plans),
        offsets=tuple(offsets),
        token_ids=torch.cat([p.token_ids for p in plans]),
        positions=torch.cat([p.positions for p in plans]),
        slots=torch.cat([p.slots for p in plans]),
    )


def _check_disjoint(plans: Sequence[RequestPlan], written: Tensor) -> None:
    per_plan = sum(torch.cat([p.slots, *(load.slots for load in p.loads)]).unique().numel() for p in plans)
    if per_plan != written.unique().numel():
        raise PlanError("invalid batch: two plans write the same slot")
