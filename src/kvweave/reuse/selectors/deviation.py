"""KV deviation: how far a token's recomputed KV is from its cached KV at a check layer.

| name | formula | source |
|---|---|---|
| ``kv`` | dK^2 / mean K_old^2 + dV^2 / mean V_old^2 | default; normalised, so that loud K channels don't decide alone |
| ``kv_raw`` | dK^2 + dV^2 | CacheBlend's text (EuroSys'25, section 4): the L2 norm over K and V together |
| ``k`` | dK^2 | LMCache 0.5 |
| ``v`` | dV^2 | the authors' released code |

Squares rank like norms. Rotation preserves lengths, so rotated and unrotated keys give the same score.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvweave.errors import InvalidOption, suggest

VARIANTS = ("kv", "kv_raw", "k", "v")


@dataclass(frozen=True)
class KVDeviation:
    """Scores rows by the deviation of their KV; a ``Scorer`` for ``Select``."""

    variant: str = "kv"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise InvalidOption(f"deviation '{self.variant}' is unknown. {suggest(self.variant, VARIANTS)}")

    def score(self, k_new: Tensor, v_new: Tensor, k_old: Tensor, v_old: Tensor) -> Tensor:
        """All [kv_heads, n, dim] -> [n] fp32, means taken over the n candidates."""
        if self.variant == "k":
            return _square(k_new, k_old)
        if self.variant == "v":
            return _square(v_new, v_old)
        if self.variant == "kv_raw":
            return _square(k_new, k_old) + _square(v_new, v_old)
        return _relative(k_new, k_old) + _relative(v_new, v_old)


def _square(new: Tensor, old: Tensor) -> Tensor:
    return (new.float() - old.float()).square().sum((0, 2))


def _relative(new: Tensor, old: Tensor) -> Tensor:
    return _square(new, old) / old.float().square().sum((0, 2)).mean().clamp_min(1e-30)
