"""What a request returns beside its text: which tokens were reused and how, and where the time went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvweave.errors import IntegrityError

SegmentResult = Literal["hit", "partial", "miss"]
TOKEN_KINDS = ("exact", "fused", "recomputed", "prefilled")
"""How the KV of a prompt token is come by, as metrics and explanations name it."""


@dataclass(frozen=True)
class SegmentReport:
    """Reuse of one document in one prompt.

    ``reason`` says why something of it is missing: never_seen, below_min, or a reason of ``kvweave.store.base.MissReason``.
    ``tiers`` names where what was found lay. ``tokens``: how all its tokens were come by, the prefix tree included, by kind
    of ``TOKEN_KINDS``.
    """

    id: str
    start: int
    stop: int
    result: SegmentResult
    reason: str | None = None
    tiers: tuple[str, ...] = ()
    tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TierLoad:
    """What one tier delivered for one request. ``load_ms`` adds up over threads."""

    chunks: int
    tokens: int
    bytes: int
    load_ms: float


@dataclass(frozen=True)
class ControllerDecision:
    """What loading was expected to cost against computing, and what followed. Times in milliseconds.

    ``ratio`` is the recompute ratio that was used, ``r_eq`` the one at which recomputing takes as long as loading.
    """

    policy: str
    run: str
    ratio: float
    r_min: float
    r_eq: float
    predicted_ttft_ms: float
    predicted_full_ms: float
    load_ms: float


@dataclass(frozen=True)
class Deviation:
    """KV deviation seen at one check layer, over the candidates: what was chosen and what was left."""

    layer: int
    mean: float
    p95: float
    max: float
    chosen: float
    """Share of the candidates that goes on."""
    max_unchosen: float


@dataclass(frozen=True)
class ReuseReport:
    """Accounting of one request's prompt tokens. Every token is in exactly one class; ``check()`` asserts that law."""

    asked: str
    ran: str
    technique: str
    prompt_tokens: int
    cached_tokens: int = 0
    """Reused exactly."""
    fused_tokens: int = 0
    """Reused out of the context it was made in: approximate."""
    recomputed_tokens: int = 0
    """Of a chunk hit, but computed again."""
    prefilled_tokens: int = 0
    """New text, misses and the question: computed in all layers."""
    repos_tokens: int = 0
    """Reused exactly, at a position that a ``reposition`` operation changed."""
    drop_skipped_tokens: int = 0
    """Matched, but dropped at the end of the prompt: neither read nor computed."""
    restored_tokens: int = 0
    """Of the prefilled ones: history that had been known and was computed again."""
    cache_write_tokens: int = 0
    """Of the prefilled ones: entered the prefix tree."""
    prefix_tokens: int = 0
    """Of the cached ones: found in the prefix tree, at the start of the prompt."""
    fallback_reason: str | None = None
    ratio: float | None = None
    """Requested recompute ratio; ``budget`` is what was really computed."""
    budget: float = 0.0
    """Fresh token-layers of reusable tokens, selection included, over (layers x reusable tokens)."""
    segments: tuple[SegmentReport, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    loads: dict[str, TierLoad] = field(default_factory=dict)
    """By tier."""
    controller: ControllerDecision | None = None
    """None where there was nothing to decide: no load from a tier below host memory, or no controller."""
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds: queue_ms, lookup_ms, load_wait_ms (steps waited for loads: the part that wasn't hidden), prefill_ms,
    ttft_ms, decode_ms, total_ms."""

    @property
    def exact_tokens(self) -> int:
        """Another name of ``cached_tokens``, beside ``fused_tokens``."""
        return self.cached_tokens

    def check(self) -> None:
        reused = self.cached_tokens + self.repos_tokens + self.fused_tokens + self.drop_skipped_tokens
        parts = reused + self.recomputed_tokens + self.prefilled_tokens
        if max(self.restored_tokens, self.cache_write_tokens) > self.prefilled_tokens:
            raise IntegrityError(f"more tokens restored or written than computed: {self}")
        if parts != self.prompt_tokens or self.prefilled_tokens < 1:
            raise IntegrityError(f"token classes do not add up: {self}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        line = (
            f"prompt {self.prompt_tokens:,} = exact {self.cached_tokens:,} + fused {self.fused_tokens:,}"
            f" + recomputed {self.recomputed_tokens:,} + new {self.prefilled_tokens:,}"
        )
        return f"{line} ({self.fallback_reason})" if self.fallback_reason else line


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability (nats) of a generated token and of the most likely ones at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """Result of one request. ``finish_reason`` is ``stop`` or ``length``."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    reuse: ReuseReport
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per prompt token, if asked for; None for the first, and for tokens whose KV was reused."""
    index: int = 0
    """Which of a request's samples this is."""


@dataclass(frozen=True)
class Delta:
    """One streamed piece. ``text`` may be empty while bytes or a stop string are held back; the last one has ``output``."""

    text: str
    token_id: int | None
    output: Output | None = None
    index: int = 0
    """Of the request's samples."""
    logprob: TokenLogprob | None = None
