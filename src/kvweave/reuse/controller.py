"""How much to recompute when stored KV has to be loaded first (CacheBlend section 5, "loading controller").

Loading runs beside computing, layer by layer. On a slow medium recomputing more costs no time until it takes as long as the
load, and buys quality; on a fast one the ratio stays at the technique's own; where loading would lose, nothing is fused.
Pure arithmetic: rates come in, a decision goes out. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvweave.core.report import ControllerDecision
from kvweave.reuse.base import PlanRequest, Technique, Work
from kvweave.reuse.registry import with_ratio

Policy = Literal["auto", "paper"]
_GRID = 1000  # ratios are multiples of 1 / _GRID
_SLACK = 1.02  # TTFT that a higher ratio may cost
_GAIN = 0.95  # of a full prefill: above that, nothing is fused


def ttft(compute: Sequence[float], load: Sequence[float]) -> float:
    """Time to the end of the last layer: layer l starts when layer l - 1 is done and its load has arrived.

    ``compute`` and ``load`` are per layer; loads run one behind the other from the start, 0 where nothing is loaded.
    Closed form: the layer whose load is waited for last decides.
    """
    rest = sum(compute)
    arrived, worst = 0.0, rest
    for seconds, wait in zip(compute, load, strict=True):
        arrived += wait
        worst = max(worst, arrived + rest)
        rest -= seconds
    return worst


@dataclass(frozen=True)
class Costs:
    """Measured rates. ``prefill(rows, keys)`` is the time of one forward of ``rows`` tokens that see ``keys`` at the end;
    ``bandwidth`` of each tier in bytes of KV a second."""

    prefill: Callable[[float, float], float]
    bandwidth: Mapping[str, float]


def highest(fits: Callable[[float], bool], low: float) -> float:
    """The highest ratio on the grid in [low, 1] that ``fits``; ``low`` itself is taken to fit. ``fits`` falls once."""
    a, b = round(low * _GRID), _GRID
    while a < b:
        middle = (a + b + 1) // 2
        if fits(middle / _GRID):
            a = middle
        else:
            b = middle - 1
    return max(low, a / _GRID)


def choose_ratio(policy: Policy, r_min: float, r_eq: float, predict: Callable[[float], float]) -> float:
    """``paper``: r_eq, the ratio at which recomputing takes as long as loading, but at least r_min. ``auto``: the highest
    ratio that costs at most 2 % of TTFT over r_min's (the paper's rule ignores layers computed in full, and so loses time).
    """
    if policy == "paper":
        return min(1.0, max(r_min, r_eq))
    limit = _SLACK * predict(r_min)
    return highest(lambda ratio: predict(ratio) <= limit, r_min)


def decide(
    policy: Policy, technique: Technique, request: PlanRequest, costs: Costs
) -> tuple[Technique, ControllerDecision] | None:
    """The technique at the ratio to use, and why. ``run`` of the decision is ``exact`` where the cache would lose.

    None if there is nothing to decide: everything lies in host memory, a tier was never measured, or the technique doesn't
    say what it computes.
    """
    slow = [hit for hit in request.hits if hit.tier != "host"]
    work_of = getattr(technique, "work", None)
    if not slow or work_of is None or any(hit.tier not in costs.bandwidth for hit in slow):
        return None
    per_token = request.layout.bytes_per_token
    arriving = sum(hit.length * per_token / costs.bandwidth[hit.tier] for hit in slow)
    load_all = arriving / sum(hit.length for hit in slow)  # seconds a token of a slow hit
    share = sum(hit.length for hit in slow) / sum(hit.length for hit in request.hits)
    total = request.num_tokens
    full = costs.prefill(request.computable.numel(), total)

    def predict(ratio: float | None) -> float:
        made = technique if ratio is None else with_ratio(technique, ratio)
        return _predict(made.work(request), costs, total, load_all * share)  # type: ignore[attr-defined]

    ratio: Any = getattr(technique, "ratio", None)
    r_min = 0.0 if ratio is None else float(ratio)
    r_eq = arriving / full
    chosen = technique
    if ratio is not None and r_min < 1:
        r = choose_ratio(policy, r_min, r_eq, predict)
        chosen = technique if r == r_min else with_ratio(technique, r)
        ratio = r
    expected = predict(ratio)
    loses = expected > _GAIN * full or (policy == "paper" and r_eq >= 1)
    return chosen, ControllerDecision(
        policy=policy,
        run="exact" if loses else "fused",
        ratio=1.0 if loses else float(ratio or 0.0),
        r_min=r_min,
        r_eq=r_eq,
        predicted_ttft_ms=expected * 1e3,
        predicted_full_ms=full * 1e3,
        load_ms=arriving * 1e3,
    )


def exact_loads_pay(request: PlanRequest, costs: Costs) -> bool:
    """False if loading exact chunks of measured tiers takes longer than computing their tokens as well."""
    slow = [hit for hit in request.exact_hits if hit.tier in costs.bandwidth]
    layers, total = request.layout.num_layers, request.num_tokens
    arriving = sum(hit.length * request.layout.bytes_per_token / costs.bandwidth[hit.tier] for hit in slow)
    rest = request.computable.numel()
    with_loads = ttft([costs.prefill(rest, total) / layers] * layers, [arriving / layers] * layers)
    return with_loads <= _GAIN * costs.prefill(rest + sum(hit.length for hit in slow), total)


def _predict(work: Work, costs: Costs, keys: int, load_per_token: float) -> float:
    """Passes run one behind the other; all loads belong to the first."""
    times = []
    for number, rows in enumerate(work.passes):
        layers = len(rows)
        compute = [costs.prefill(n, keys) / layers if n else 0.0 for n in rows]
        each = work.loaded * load_per_token / layers
        load = [each if number == 0 and layer >= work.first_loaded else 0.0 for layer in range(layers)]
        times.append(ttft(compute, load))
    return sum(times)
