"""Sampling parameters of one request, and what a constraint on its answer is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvweave.errors import InvalidOption

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_LOGPROBS = 20

_WHOLE = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OPTIONAL = ("seed", "logprobs")
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


class Constraint(Protocol):
    """What one answer must look like, token by token."""

    @property
    def finished(self) -> bool:
        """True if the answer is complete and nothing may follow."""
        ...

    def allowed(self) -> bytes:
        """Token ids that may come next: id t if bit ``t % 8`` of byte ``t // 8`` is set. End-of-text ids are among them
        wherever the answer may end; ids behind the last byte are not allowed."""
        ...

    def accept(self, token: int) -> None:
        """The answer goes on with ``token``, one of the allowed ones."""
        ...


ConstraintFactory = Callable[[], Constraint]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. The default is greedy, 128 tokens. Raises ``InvalidOption``, with ``param``.

    Which tokens may come:
        ``temperature`` below 1e-5 is greedy. ``top_k`` 0 (or -1), ``top_p`` 1 and ``min_p`` 0 switch these filters off;
        ``min_p`` is relative to the most likely token. ``seed`` makes a sampled request reproducible; sample i of several
        has ``seed + i``. ``presence_penalty`` and ``frequency_penalty`` count tokens of the answer, ``repetition_penalty``
        (1 is off) looks at prompt and answer. ``logit_bias`` adds to the logits of token ids.
    When it ends:
        at an end-of-text token (unless ``ignore_eos``), one of ``stop_token_ids``, a ``stop`` string (not part of the text
        unless ``include_stop_str_in_output``) or after ``max_tokens``; none of the first three before ``min_tokens``.
    What comes with it:
        ``logprobs`` = n: the log probability of the chosen token and the n most likely ones at every step (0: the chosen
        one alone, None: none). ``skip_special_tokens`` leaves control tokens out of the text.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._check_ranges()

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # smaller ones overflow; vLLM draws the same line

    def _check_types(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            self._check(_is_whole(value) or (value is None and name in _OPTIONAL), name, "a whole number")
        for name in _NUMBERS:
            self._check(_is_number(getattr(self, name)), name, "a number")
        for name in _FLAGS:
            self._check(isinstance(getattr(self, name), bool), name, "true or false")
        strings = isinstance(self.stop, str | list | tuple) and all(isinstance(s, str) for s in self.stop)
        self._check(strings, "stop", "a string or a list of strings")
        ids = self.stop_token_ids
        self._check(isinstance(ids, list | tuple) and all(map(_is_whole, ids)), "stop_token_ids", "a list of token ids")
        self._check(isinstance(self.logit_bias, Mapping), "logit_bias", "a mapping of token ids to numbers")

    def _check_ranges(self) -> None:
        stop_ok = len(self.stop) <= MAX_STOP_STRINGS and all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop)
        bias_ok = all(_is_whole(t) and t >= 0 and _is_number(b) and -100 <= b <= 100 for t, b in self.logit_bias.items())
        checks = (
            (self.max_tokens >= 0, "max_tokens", "0 or more"),
            (0.0 <= self.temperature <= 100.0, "temperature", "0 (greedy) to 100"),
            (0.0 < self.top_p <= 1.0, "top_p", "a number above 0 and at most 1"),
            (self.top_k >= 0, "top_k", "0 (off) or more"),
            (0.0 <= self.min_p <= 1.0, "min_p", "0 (off) to 1"),
            (self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "-2 to 2"),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "-2 to 2"),
            (0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "a number above 0 and at most 100 (1 is off)"),
            (bias_ok, "logit_bias", "token ids from 0 on, each with a number from -100 to 100"),
            (stop_ok, "stop", f"at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_LENGTH} characters"),
            (all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", "ids from 0 on"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", "0 to max_tokens"),
            (self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"0 to {MAX_LOGPROBS}, or None"),
        )
        for ok, name, expected in checks:
            self._check(ok, name, expected)

    def _check(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            value = repr(getattr(self, name))
            shown = value if len(value) <= 80 else value[:77] + "..."
            raise InvalidOption(f"{name}={shown} can't be used. Give {expected}.", param=name)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
