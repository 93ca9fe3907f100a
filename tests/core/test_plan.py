"""Plan invariants, cutting, batches and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvweave.core.batch import build_batch
from kvweave.core.keys import ModelFingerprint, Scope, chunk_key
from kvweave.core.plan import Keep, Load, RequestPlan, Save, Select, View, split, validate
from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.errors import PlanError
from kvweave.reuse.selectors.deviation import KVDeviation

LAYOUT = KVLayout(tuple([LayerSpec(4, 2, 16, 16)] * 4), torch.float32)


def plan(n: int = 6, **changes: Any) -> RequestPlan:
    slots = torch.arange(10, 10 + n)
    base = RequestPlan(
        token_ids=torch.arange(n),
        positions=torch.arange(n),
        slots=slots,
        views=(View(0, n, slots, torch.arange(1, n + 1)),),
        logits=torch.tensor([n - 1]),
    )
    return replace(base, **changes)


def select(**changes: Any) -> Select:
    base = Select(1, KVDeviation(), torch.tensor([0, 1, 2]), torch.tensor([0]), torch.tensor([3, 4, 5]), 2)
    return replace(base, **changes)


def test_good_plans_pass() -> None:
    validate(plan(), LAYOUT, 100)
    validate(plan(steps=(Keep(1, torch.tensor([1, 5])), Keep(3, torch.tensor([5])))), LAYOUT, 100)
    validate(plan(steps=(select(), select(after_layer=2, keep=1))), LAYOUT, 100)


SLOTS = torch.arange(10, 16)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "position beyond the context": ({"positions": torch.arange(95, 101)}, "positions"),
    "slot written twice": ({"slots": torch.tensor([10, 10, 12, 13, 14, 15])}, "written by one row"),
    "views leave a row out": ({"views": (View(0, 5, SLOTS, torch.arange(1, 6)),)}, "cover every row"),
    "views overlap": (
        {"views": (View(0, 4, SLOTS, torch.arange(1, 5)), View(3, 6, SLOTS, torch.arange(4, 7)))},
        "partition",
    ),
    "sees nothing": ({"views": (View(0, 6, SLOTS, torch.arange(6)),)}, "1 <= visible"),
    "sees beyond its context": ({"views": (View(0, 6, SLOTS, torch.arange(2, 8)),)}, "1 <= visible"),
    "one wrong mask bit": ({"views": (View(0, 6, SLOTS, torch.tensor([1, 2, 4, 4, 5, 6])),)}, "own slot"),
    "visible out of order": ({"views": (View(0, 6, SLOTS, torch.tensor([2, 1, 3, 4, 5, 6])),)}, "ascends"),
    "a slot twice in a context": (
        {"views": (View(0, 6, torch.cat([SLOTS, SLOTS[:1]]), torch.arange(1, 7)),)},
        "names a slot once",
    ),
    "rows come back": ({"steps": (Keep(1, torch.tensor([5])), Keep(2, torch.tensor([4, 5])))}, "dropped earlier"),
    "kept rows out of order": ({"steps": (Keep(1, torch.tensor([5, 4])),)}, "ascend"),
    "steps out of order": ({"steps": (Keep(2, torch.tensor([5])), Keep(1, torch.tensor([5])))}, "order of layers"),
    "step behind the last layer": ({"steps": (Keep(4, torch.tensor([5])),)}, "order of layers"),
    "row with logits dropped": ({"steps": (Keep(1, torch.tensor([4])),)}, "survive"),
    "check at layer 0": ({"steps": (select(after_layer=0),)}, "layer 0"),
    "keeps more than there are": ({"steps": (select(keep=4),)}, "at most"),
    "head isn't a candidate": ({"steps": (select(heads=torch.tensor([5])),)}, "heads"),
    "always and candidate": ({"steps": (select(always=torch.tensor([2, 3, 4, 5])),)}, "disjoint"),
}


@pytest.mark.parametrize("case", BAD)
def test_every_broken_invariant_is_named(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(PlanError, match=message):
        validate(plan(**changes), LAYOUT, 100)


def test_saved_rows_must_run_in_all_layers() -> None:
    class Sink:
        def put(self, layer: int, rows: slice, keys: torch.Tensor, values: torch.Tensor) -> None: ...

    validate(plan(saves=(Save(1, 4, Sink()),)), LAYOUT, 100)
    with pytest.raises(PlanError, match="all layers"):
        validate(plan(saves=(Save(1, 4, Sink()),), steps=(Keep(1, torch.tensor([5])),)), LAYOUT, 100)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 9])
def test_blocks_are_the_plan_in_order(size: int) -> None:
    whole = plan(6, steps=(Keep(1, torch.tensor([0, 3, 5])),), reusable=torch.tensor([True, False] * 3))
    blocks = list(split(whole, size))
    assert torch.equal(torch.cat([b.token_ids for b in blocks]), whole.token_ids)
    assert sum(b.logits.numel() for b in blocks) == 1
    assert sum(int(b.steps[0].rows.numel()) for b in blocks) == 3  # type: ignore[union-attr]
    for block in blocks:
        validate(block, LAYOUT, 100)
        assert block.num_rows <= size
    dynamic = plan(steps=(select(),))
    assert list(split(dynamic, 2)) == [dynamic]


def test_a_batch_refuses_two_writers_of_a_slot() -> None:
    other = plan(slots=torch.arange(20, 26), views=(View(0, 6, torch.arange(20, 26), torch.arange(1, 7)),))
    assert build_batch([plan(), other]).offsets == (0, 6, 12)
    with pytest.raises(PlanError, match="same slot"):
        build_batch([plan(), plan()])

    class Source:
        def layer(self, layer: int) -> Any: ...

    at = torch.tensor([3])
    with pytest.raises(PlanError, match="same slot"):
        build_batch([plan(), replace(other, loads=(Load(Source(), at, torch.tensor([10]), at, at),))])


FINGERPRINT = ModelFingerprint.of(content="a", dtype="bf16")


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": [1, 2, 4]},
        {"token_ids": [1, 2], "anchor_ids": [9, 3]},
        {"anchor_ids": []},
        {"anchor_ids": [8]},
        {"fingerprint": ModelFingerprint.of(content="b", dtype="bf16")},
        {"fingerprint": ModelFingerprint.of(content="a", dtype="fp32")},
        {"scope": Scope.of("u")},
        {"scope": Scope.of("")},
        {"scope": Scope.of("t", epoch=1)},
        {"scope": Scope.of("t", secret=b"s")},
    ],
)
def test_every_part_of_a_key_counts(changed: dict[str, Any]) -> None:
    """T19: leave one part out and KV of the right shape but another meaning would be found."""
    base: dict[str, Any] = {"token_ids": [1, 2, 3], "anchor_ids": [9], "fingerprint": FINGERPRINT, "scope": Scope.of("t")}
    assert chunk_key(**base) == chunk_key(**base)
    assert len(chunk_key(**base).content) == 16
    assert chunk_key(**base).content != chunk_key(**(base | changed)).content
