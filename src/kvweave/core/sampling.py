"""Sampling parameters of one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvweave.errors import InvalidOption


class Constraint(Protocol):
    """What an answer must look like, token by token."""

    @property
    def finished(self) -> bool:
        """True if nothing may follow."""
        ...

    def allowed(self) -> Sequence[int]:
        """Token ids that may come next."""
        ...

    def accept(self, token: int) -> None: ...


ConstraintFactory = Callable[[], Constraint]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. The default is greedy, 128 tokens.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch those filters off. ``seed`` makes a sampled request
    reproducible. ``stop`` strings end the text in front of them. ``logprobs`` = n returns the chosen token's log
    probability and the n most likely ones at every step (0: the chosen one alone, None: none).
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("max_tokens", "top_k", "seed", "logprobs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise InvalidOption(f"{name}={value!r} is not a whole number. Give one.")
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), int | float):
                raise InvalidOption(f"{name}={getattr(self, name)!r} is not a number. Give one.")
        if not all(isinstance(s, str) for s in self.stop) or not all(isinstance(t, int) for t in self.stop_token_ids):
            raise InvalidOption("stop takes strings, stop_token_ids takes token ids. Give lists of those.")
        checks = (
            (self.max_tokens >= 0, "max_tokens", "0 or more"),
            (0.0 <= self.temperature <= 100.0, "temperature", "0 (greedy) to 100"),
            (0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (self.seed is None or 0 <= self.seed < 2**63, "seed", "0 to 2^63 - 1"),
            (len(self.stop) <= 16 and all(self.stop), "stop", "at most 16 non-empty strings"),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "0 to 20, or None"),
        )
        for ok, name, expected in checks:
            if not ok:
                raise InvalidOption(f"{name}={getattr(self, name)!r} is out of range. Use {expected}.")
