"""T17: the controller's arithmetic against worked examples, a recursion, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.reuse.base import ChunkHit, PlanRequest
from kvweave.reuse.cacheblend import CacheBlend
from kvweave.reuse.controller import Costs, choose_ratio, decide, ttft
from kvweave.reuse.registry import make_technique

SECONDS = st.floats(0, 10)


def blend(layers: int, full: float, load: float, ratio: float) -> float:
    """TTFT of cacheblend in the paper's terms: two full layers, then a share; loads from layer 1 on."""
    return ttft([full, full, *[ratio * full] * (layers - 2)], [0.0, *[load] * (layers - 1)])


@pytest.mark.parametrize(
    ("layers", "full", "load", "r_eq", "ratios", "times"),
    [
        (32, 20.0, 16.0, 0.80, (0.80, 0.649), (499, 520, 509)),
        (80, 7 / 0.15, 4.0, 0.086, (0.15, 0.153), (639.3, 639.3, 650.3)),
        (32, 20.0, 3.355, 0.168, (0.168, 0.154), (130, 140.7, 132.4)),
    ],
    ids=["7B from NVMe", "70B from NVMe", "7B from host memory"],
)
def test_the_papers_examples(
    layers: int, full: float, load: float, r_eq: float, ratios: tuple[float, float], times: tuple[float, float, float]
) -> None:
    """Ratios of the policies paper and auto; TTFT in ms at r_min, at the paper's ratio and at ours."""
    (paper, ours), (at_r_min, at_paper, at_ours) = ratios, times
    balance = load / full

    def predict(ratio: float) -> float:
        return blend(layers, full, load, ratio)

    assert balance == pytest.approx(r_eq, abs=5e-4)
    assert choose_ratio("paper", 0.15, balance, predict) == pytest.approx(paper, abs=5e-4)
    assert choose_ratio("auto", 0.15, balance, predict) == pytest.approx(ours, abs=1e-9)
    assert predict(0.15) == pytest.approx(at_r_min, abs=0.5)
    assert predict(max(0.15, balance)) == pytest.approx(at_paper, abs=0.5)
    assert predict(ours) == pytest.approx(at_ours, abs=0.5)


def recursion(compute: list[float], load: list[float]) -> float:
    arrived = done = 0.0
    for c, d in zip(compute, load, strict=True):
        arrived += d
        done = max(done, arrived) + c
    return done


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=40))
def test_the_closed_form_is_the_recursion(layers: list[tuple[float, float]]) -> None:
    compute, load = [c for c, _ in layers], [d for _, d in layers]
    assert ttft(compute, load) == pytest.approx(recursion(compute, load))
    assert ttft(compute, load) >= max(sum(compute), sum(load)) - 1e-9


LAYOUT = KVLayout((LayerSpec(4, 2, 16, 16),) * 32, torch.float32)


def request(tier: str = "disk") -> PlanRequest:
    """1,000 tokens: two chunks of 400, 100 in front, 100 behind."""
    hits = tuple(ChunkHit(at, at + 400, None, 1, True, tier) for at in (100, 500))  # type: ignore[arg-type]
    return PlanRequest(torch.zeros(1000, dtype=torch.int64), torch.arange(1000), LAYOUT, 4096, hits=hits)


def costs(bandwidth: float) -> Costs:
    return Costs(lambda rows, keys: 1e-3 * rows, {"disk": bandwidth})


RATED = ("cacheblend", "epic:ratio=0.15", "question", "random", "random:full_layers=2", "cacheblend:schedule=gradual")


@pytest.mark.parametrize("name", RATED)
@given(a=st.floats(1e5, 1e10), b=st.floats(1e5, 1e10), policy=st.sampled_from(["auto", "paper"]))
def test_a_faster_medium_never_asks_for_more_recomputation(name: str, a: float, b: float, policy: str) -> None:
    technique = make_technique(name)
    found = [decide(policy, technique, request(), costs(rate)) for rate in sorted((a, b))]  # type: ignore[arg-type]
    slow, fast = (d[1] for d in found if d is not None)
    assert slow.ratio >= fast.ratio >= 0.15
    assert slow.predicted_ttft_ms <= 0.95 * slow.predicted_full_ms or slow.run == "exact"


@pytest.mark.parametrize("name", [*RATED, "naive", "epic:k=16"])
def test_where_loading_loses_nothing_is_fused(name: str) -> None:
    decided = decide("auto", make_technique(name), request(), costs(1e4))
    assert decided is not None
    assert decided[1].run == "exact"
    assert decided[1].predicted_ttft_ms > 0.95 * decided[1].predicted_full_ms


def test_nothing_to_decide() -> None:
    technique = CacheBlend()
    assert decide("auto", technique, request("host"), costs(1e9)) is None
    assert decide("auto", technique, request("redis"), costs(1e9)) is None, "never measured"
    assert decide("auto", make_technique("full"), request(), costs(1e9)) is None, "doesn't say what it computes"


def test_a_fast_medium_leaves_the_ratio_alone() -> None:
    technique = make_technique("epic:ratio=0.2")
    chosen, decision = decide("paper", technique, request(), costs(1e12)) or pytest.fail("undecided")
    assert chosen == technique
    assert (decision.run, decision.ratio, decision.r_min) == ("fused", 0.2, 0.2)


@pytest.mark.parametrize("name", [*RATED, "naive", "raw", "epic:k=16", "cacheblend:check_layer=3"])
def test_work_is_what_the_plans_do(name: str) -> None:
    """What a technique says it will compute and load, against the plans it makes."""
    technique, wanted = make_technique(name), request()
    work = technique.work(wanted)  # type: ignore[attr-defined]
    plans = list(technique.plan(wanted))
    assert len(plans) == len(work.passes)
    for plan, rows in zip(plans, work.passes, strict=True):
        assert plan.num_rows == rows[0]
    assert sum(load.tokens.numel() for plan in plans for load in plan.loads) == work.loaded
    assert {load.first_layer for plan in plans for load in plan.loads} == {work.first_loaded}
    if name.startswith("cacheblend"):
        kept = [step.keep + step.always.numel() for step in plans[0].steps]  # type: ignore[union-attr]
        assert list(dict.fromkeys(work.passes[0]))[1:] == kept


def test_a_ratio_of_one_is_left_alone() -> None:
    wanted = replace(request(), hits=request().hits[:1])
    chosen, decision = decide("auto", CacheBlend(ratio=1.0), wanted, costs(1e9)) or pytest.fail("undecided")
    assert chosen == CacheBlend(ratio=1.0)
    assert decision.run == "exact", "computing everything and loading as well loses"
