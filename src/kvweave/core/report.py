"""What a request returns beside its text: which tokens were reused and how, and where the time went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvweave.errors import IntegrityError


@dataclass(frozen=True)
class SegmentReport:
    """Reuse of one document in one prompt. ``result`` is hit, partial or miss; ``reason`` says why not (closed list)."""

    id: str
    start: int
    stop: int
    result: str
    reason: str | None = None


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
    fallback_reason: str | None = None
    ratio: float | None = None
    """Requested recompute ratio; ``budget`` is what was really computed."""
    budget: float = 0.0
    """Fresh token-layers of reusable tokens, selection included, over (layers x reusable tokens)."""
    segments: tuple[SegmentReport, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds: queue_ms, lookup_ms, prefill_ms, ttft_ms, decode_ms, total_ms."""

    @property
    def exact_tokens(self) -> int:
        return self.cached_tokens

    def check(self) -> None:
        parts = self.cached_tokens + self.fused_tokens + self.recomputed_tokens + self.prefilled_tokens
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


@dataclass(frozen=True)
class Delta:
    """One streamed piece. ``text`` may be empty while bytes or a stop string are held back; the last one has ``output``."""

    text: str
    token_id: int | None
    output: Output | None = None
