"""Cutting documents into chunks and finding cached ones in a prompt.

Cutting is a pure function of the document's token ids: a fixed grid from its own start. Lookup is by content, each chunk
on its own; a miss in the middle never hides a later hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvweave.core.keys import ChunkIdentity, ModelFingerprint, Scope
from kvweave.core.prompt import TokenPrompt
from kvweave.core.report import SegmentReport, SegmentResult
from kvweave.errors import InvalidOption
from kvweave.store.base import ChunkStore, Miss, StoredChunk


@dataclass(frozen=True)
class Chunking:
    """How documents are cut, in tokens.

    A tail shorter than ``min_tokens`` joins the piece before it; a whole document shorter than that isn't cached. Pieces of
    one document are computed together (piece i attends to pieces 0..i-1, which are part of its anchor), unless
    ``isolated_pieces``.
    """

    size: int = 512
    min_tokens: int = 64
    isolated_pieces: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.min_tokens <= self.size:
            raise InvalidOption(f"chunks of {self.size} tokens, at least {self.min_tokens}: use 0 < min_tokens <= size.")

    def cut(self, num_tokens: int) -> list[tuple[int, int]]:
        """[start, stop) of each piece; empty for a document below ``min_tokens``."""
        if num_tokens < self.min_tokens:
            return []
        starts = list(range(0, num_tokens, self.size))
        if len(starts) > 1 and num_tokens - starts[-1] < self.min_tokens:
            starts.pop()
        return list(zip(starts, [*starts[1:], num_tokens], strict=True))


@dataclass(frozen=True)
class Piece:
    """One chunk of a document, which starts at token ``start`` of it."""

    start: int
    identity: ChunkIdentity

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.identity.token_ids

    @property
    def anchor_ids(self) -> tuple[int, ...]:
        return self.identity.anchor_ids


@dataclass(frozen=True)
class FoundChunk:
    """A cached chunk at [start, stop) of a prompt. ``exact``: everything in front of it is its anchor."""

    start: int
    stop: int
    record: StoredChunk
    exact: bool
    border: bool

    @property
    def birth(self) -> int:
        """Position of its first token when it was computed."""
        return len(self.record.identity.anchor_ids)


@dataclass(frozen=True)
class Found:
    """What the store had for a prompt, under one scope. ``close`` gives back what its records hold open."""

    scope: Scope
    chunks: tuple[FoundChunk, ...] = ()
    segments: tuple[SegmentReport, ...] = ()

    def close(self) -> None:
        for chunk in self.chunks:
            chunk.record.close()


@dataclass(frozen=True)
class ChunkIndex:
    """Content-addressed lookup for one model over a store. ``tenant`` is whose chunks are meant where nobody says.

    ``lossy``: the store's codec changes numbers, so no chunk is ever exact.
    """

    store: ChunkStore
    fingerprint: ModelFingerprint
    tenant: str
    chunking: Chunking = field(default_factory=Chunking)
    lossy: bool = False

    def scope(self, tenant: str | None = None, salt: str = "") -> Scope:
        """A tenant's current scope; may wait for a look at a slow tier."""
        return self.store.scope(self.tenant if tenant is None else tenant).narrowed(salt)

    def pieces(self, token_ids: Sequence[int], anchor_ids: Sequence[int], scope: Scope | None = None) -> list[Piece]:
        """The chunks of a document behind an anchor."""
        scope = scope or self.scope()
        ids, anchor = tuple(token_ids), tuple(anchor_ids)
        out = []
        for start, stop in self.chunking.cut(len(ids)):
            behind = anchor if self.chunking.isolated_pieces else anchor + ids[:start]
            out.append(Piece(start, ChunkIdentity.of(ids[start:stop], behind, self.fingerprint, scope)))
        return out

    def lookup(self, prompt: TokenPrompt, anchors: Sequence[tuple[int, ...]], scope: Scope | None = None) -> Found:
        """All cached chunks of a prompt in order, from one batched store call, and a report per document.

        ``anchors``: what the chunks may have been computed behind; a record of an earlier one is preferred.
        """
        scope = scope or self.scope()
        documents: list[_Placed] = []
        at = 0
        for span in prompt.spans:
            if span.document is not None:
                label = span.document.id or f"document-{len(documents)}"
                cut = span.document.kind == "document"
                choices = tuple(zip(*(self.pieces(span.token_ids, a, scope) for a in anchors), strict=True)) if cut else ()
                documents.append(_Placed(label, at, at + len(span.token_ids), choices))
            at += len(span.token_ids)
        wanted = {p.identity.key: p.identity for d in documents for choice in d.choices for p in choice}
        answers = dict(zip(wanted, self.store.find(list(wanted.values())), strict=True))
        found: list[FoundChunk] = []
        reports = []
        for document in documents:
            before = len(found)
            missed: Miss | None = None
            for choice in document.choices:
                records = [(p, answers[p.identity.key]) for p in choice]
                hit = next(((p, r) for p, r in records if not isinstance(r, Miss)), None)
                if hit is not None:
                    found.append(self._found(prompt, document.start + hit[0].start, *hit, found))
                elif missed is None:
                    missed = _most_telling([r for _, r in records if isinstance(r, Miss)])
            reports.append(_report(document, found[before:], missed))
        used = {id(chunk.record) for chunk in found}
        for answer in answers.values():
            if not isinstance(answer, Miss) and id(answer) not in used:
                answer.close()  # the same chunk behind a better anchor was found as well
        return Found(scope, tuple(found), tuple(reports))

    def _found(
        self, prompt: TokenPrompt, start: int, piece: Piece, record: StoredChunk, before: list[FoundChunk]
    ) -> FoundChunk:
        joined = piece.start > 0 and not self.chunking.isolated_pieces and _continues(before, start, piece)
        exact = not self.lossy and prompt.token_ids[:start] == piece.anchor_ids
        return FoundChunk(start, start + len(piece.token_ids), record, exact, border=not joined)


def _continues(before: list[FoundChunk], start: int, piece: Piece) -> bool:
    """The chunk in front is the piece in front, computed behind the same anchor (its birth tells the anchor's length)."""
    if not before or before[-1].stop != start:
        return False
    previous = before[-1]
    return previous.birth + previous.stop - previous.start == len(piece.anchor_ids)


def _report(document: _Placed, hits: Sequence[FoundChunk], missed: Miss | None) -> SegmentReport:
    result: SegmentResult = "miss" if not hits else "hit" if len(hits) == len(document.choices) else "partial"
    reason = "below_min" if missed is None and not hits else None if missed is None else miss_reason(missed.reason)
    tiers = tuple(dict.fromkeys(hit.record.tier for hit in hits))
    return SegmentReport(document.label, document.start, document.stop, result, reason, tiers)


def miss_reason(reason: str) -> str:
    """A store's reason as reports name it."""
    return "never_seen" if reason == "absent" else reason


def _most_telling(misses: Sequence[Miss]) -> Miss:
    return next((m for m in misses if m.reason != "absent"), misses[0])


@dataclass(frozen=True)
class _Placed:
    """A document of a prompt: per piece, the chunk under every anchor."""

    label: str
    start: int
    stop: int
    choices: tuple[tuple[Piece, ...], ...]
