"""Why a prompt was or wasn't reused: the ``cache`` object of an answer, and the difference between two requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvweave.core.report import TOKEN_KINDS, ReuseReport, SegmentReport
from kvweave.server.shape import Piece, RequestShape

MissReason = Literal[
    "never_seen",
    "system_changed",
    "tools_changed",
    "messages_changed",
    "ops_changed",
    "template_changed",
    "salt_changed",
    "model_changed",
    "retokenized",  # the same text, other ids: an answer that was rendered back, say
    "evicted",
    "expired",
    "not_stored",
    "below_min",
]
"""Why something wasn't reused: a closed list."""

_STORE_REASONS: dict[str, MissReason] = {
    "never_seen": "never_seen",
    "below_min": "below_min",
    "evicted": "evicted",
    "expired": "expired",
    "fingerprint": "model_changed",
}
"""What else a store says (deleted, damaged, too late) leaves nothing stored that could be used."""


@dataclass(frozen=True)
class Earlier:
    """An earlier request of the same tenant, as far as a later one is compared with it. Times are unix seconds."""

    id: str
    shape: RequestShape
    published: int
    """Leading prompt tokens whose exact KV entered the prefix tree."""
    written: int
    """Tokens that had KV in the end: the prompt and all but the last one of the answer."""
    expires: float | None = None


@dataclass(frozen=True)
class Circumstances:
    """What an explanation says beside the report. ``now`` is a unix time."""

    now: float
    gate: str | None = None
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def explain(report: ReuseReport, shape: RequestShape, earlier: Earlier | None, around: Circumstances) -> dict[str, Any]:
    """The ``cache`` object. Its segments and ``other`` add up to the report's token classes."""
    left = _left_at(report, shape, earlier, around.now)
    segments = [_segment(segment, shape, left, report) for segment in report.segments]
    other = Counter(token_kinds(report))
    for segment in report.segments:
        other.subtract(segment.tokens)
    return {
        "asked": report.asked,
        "ran": report.ran,
        "technique": report.technique,
        "fallback_reason": report.fallback_reason,
        "gate": around.gate,
        "prefix": {"hit_tokens": report.prefix_tokens, "diverged": left},
        "segments": segments,
        "other": _present(other),
        "restore": {"tokens": report.restored_tokens, "intervals": []},
        "ignored": list(around.ignored),
        "warnings": list(around.warnings),
        "ops": [],
    }


def compare(shape: RequestShape, earlier: RequestShape) -> dict[str, Any] | None:
    """Where the prompt of ``shape`` leaves an earlier one; None if one is the other's beginning, or they are equal.

    ``token`` is the first one that is known to differ: exact where a piece ends, else at most ``STRIDE`` - 1 too early.
    ``cost_tokens`` counts from there to the end.
    """
    elsewhere = _other_context(shape, earlier)
    token = 0 if elsewhere else shape.common(earlier)
    if token >= min(shape.num_tokens, earlier.num_tokens):
        return None
    piece = shape.piece_at(token)
    reason = elsewhere or _changed(piece, shape, earlier)
    return _divergence(token, piece, reason, shape.num_tokens - token)


def _left_at(report: ReuseReport, shape: RequestShape, earlier: Earlier | None, now: float) -> dict[str, Any] | None:
    """Where the prompt left what was cached, and why; None if nothing was looked for, or nothing was missing."""
    token = report.prefix_tokens
    if report.ran == "off" or token >= shape.num_tokens - 1:  # the last token is always computed
        return None
    piece = shape.piece_at(token)
    reason = "never_seen" if earlier is None else _why_left(token, piece, shape, earlier, now)
    return _divergence(token, piece, reason, report.prefilled_tokens)


def _why_left(token: int, piece: Piece, shape: RequestShape, earlier: Earlier, now: float) -> MissReason:
    elsewhere = _other_context(shape, earlier.shape)
    if elsewhere:
        return elsewhere
    common = shape.common(earlier.shape)
    if token < common:  # it was asked before, up to there at least
        if token >= earlier.published:
            return "not_stored"
        return "expired" if earlier.expires is not None and earlier.expires <= now else "evicted"
    if token >= earlier.shape.num_tokens:  # all of it was found
        rendered_back = token < earlier.written and piece.text in earlier.shape.answers
        return "retokenized" if rendered_back else "never_seen"
    if not common and not _share_text(shape, earlier.shape):
        return "never_seen"
    return _changed(piece, shape, earlier.shape)


def _other_context(shape: RequestShape, earlier: RequestShape) -> MissReason | None:
    if shape.model != earlier.model:
        return "model_changed"
    return "salt_changed" if shape.salt != earlier.salt else None


def _changed(piece: Piece, shape: RequestShape, earlier: RequestShape) -> MissReason:
    """What of two prompts differs, where the first difference lies in ``piece``."""
    if shape.template != earlier.template:
        return "template_changed"
    if piece.message in (0, None) or piece.kind == "system":  # templates write tools in front, or into the system message
        if shape.system != earlier.system:
            return "system_changed"
        if shape.tools != earlier.tools:
            return "tools_changed"
    return "messages_changed"


def _share_text(shape: RequestShape, earlier: RequestShape) -> bool:
    return bool({p.text for p in shape.pieces if p.text} & {p.text for p in earlier.pieces})


def _divergence(token: int, piece: Piece, reason: MissReason, cost: int) -> dict[str, Any]:
    place = {"token": token, "message": piece.message, "segment": piece.segment}
    return {**place, "reason": reason, "cost_tokens": cost}


def _segment(
    segment: SegmentReport, shape: RequestShape, left: Mapping[str, Any] | None, report: ReuseReport
) -> dict[str, Any]:
    reused = sum(segment.tokens[kind] for kind in TOKEN_KINDS if kind != "prefilled")
    result = "hit" if not segment.tokens["prefilled"] else "partial" if reused else "miss"
    piece = shape.piece_at(segment.start)
    described: dict[str, Any] = {
        "segment": segment.id,
        "kind": piece.kind,
        "message": piece.message,
        "span": [segment.start, segment.stop],
        "result": result,
        "tokens": _present(segment.tokens),
    }
    if reused:
        described["tier"] = segment.tiers[0] if segment.tiers else "device"
    if result != "hit":
        described["reason"] = _segment_reason(segment, left, report)
    return described


def _segment_reason(segment: SegmentReport, left: Mapping[str, Any] | None, report: ReuseReport) -> str:
    """In exact mode documents are found with the prefix or not at all; elsewhere the store says why."""
    known = _STORE_REASONS.get(segment.reason or "never_seen", "not_stored")
    if report.ran == "exact" and left is not None and known == "never_seen":
        return str(left["reason"])
    return known


def _present(tokens: Mapping[str, int]) -> dict[str, int]:
    return {kind: tokens[kind] for kind in TOKEN_KINDS if tokens[kind]}


def published_tokens(report: ReuseReport, *, publish: bool) -> int:
    """Leading prompt tokens whose exact KV a request left in the prefix tree: none behind the first fused one."""
    if not publish:
        return 0
    fused: Sequence[SegmentReport] = [s for s in report.segments if s.tokens["fused"] or s.tokens["recomputed"]]
    return fused[0].start if fused else report.prompt_tokens


def token_kinds(report: ReuseReport) -> dict[str, int]:
    """All prompt tokens by kind of ``TOKEN_KINDS``."""
    counts = (report.cached_tokens, report.fused_tokens, report.recomputed_tokens, report.prefilled_tokens)
    return dict(zip(TOKEN_KINDS, counts, strict=True))
