"""The arms of the comparison: a technique with its options, behind an anchor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.reuse.base import Technique
from kvweave.reuse.registry import make_technique

ANCHORS = ("head", "bos")
BOTH_ANCHORS = ("naive", "epic:k=16", "cacheblend:ratio=0.15", "question:ratio=0.15")
KEY_ARMS = ("naive", "epic:k=16", "epic:ratio=0.15", "cacheblend:ratio=0.15", "question:ratio=0.15", "full")
"""Arms that also get the likelihood of the reference answer and an answer of their own."""

SPECS = (
    "naive",
    "raw",
    *(f"epic:k={k}" for k in (4, 16, 32, 64, 128)),
    *(f"epic:ratio={r}" for r in (0.05, 0.15, 0.3, 1.0)),
    *(f"random:ratio={r}" for r in (0.05, 0.15, 0.3, 1.0)),
    "random:ratio=0.15,full_layers=2",
    *(f"cacheblend:ratio={r}" for r in (0.0, 0.05, 0.15, 0.3, 1.0)),
    *(f"cacheblend:ratio={r},schedule=gradual" for r in (0.15, 0.3)),
    *(f"cacheblend:ratio=0.15,deviation={d}" for d in ("k", "v", "kv_raw")),
    *(f"question:ratio={r}" for r in (0.05, 0.15, 0.3, 1.0)),
)


@dataclass(frozen=True)
class Arm:
    """``spec`` as in ``make_technique``; ``anchor`` is what the documents were computed behind ("" for full)."""

    spec: str
    anchor: str

    def draws(self, count: int) -> list[Technique]:
        """One technique, or ``count`` with different seeds if it has a seed that the spec leaves open."""
        first = make_technique(self.spec)
        if not hasattr(first, "seed") or "seed=" in self.spec or self.full_ratio:
            return [first]
        return [make_technique(self.spec, seed=seed) for seed in range(count)]

    @property
    def technique(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def ratio(self) -> float | None:
        """The nominal ratio; None where the technique has none (``epic`` with a number of tokens)."""
        fixed = {"naive": 0.0, "raw": 0.0, "full": 1.0}
        return fixed.get(self.technique, getattr(make_technique(self.spec), "ratio", None))

    @property
    def options(self) -> dict[str, Any]:
        """All options but the ratio and the seed."""
        fields = dataclasses.asdict(make_technique(self.spec))  # type: ignore[call-overload]
        left_out = {"seed", "ratio"} | ({"k"} if fields.get("ratio") is not None else set())
        return {k: v for k, v in fields.items() if k not in left_out}

    @property
    def full_ratio(self) -> bool:
        """Everything is recomputed: must equal full prefill, so a few records are enough."""
        return self.ratio == 1.0


FULL = Arm("full", "")
NOISE = Arm("full", "blocks")
"""Full prefill in blocks of another size: the noise floor of every distance here."""


def select(names: Sequence[str], anchor: str | None) -> list[Arm]:
    """Arms by technique (all its default arms) or by spec; ``anchor`` None: the default anchors of each arm."""
    specs: list[str] = []
    for name in names:
        found = [s for s in SPECS if name in (s, s.partition(":")[0])]
        specs += found or [name]
    arms = []
    for spec in dict.fromkeys(specs):
        make_technique(spec)  # refuse what doesn't exist before anything runs
        anchors = (anchor,) if anchor else ANCHORS if spec in BOTH_ANCHORS else ANCHORS[:1]
        arms += [Arm(spec, a) for a in anchors]
    return arms
