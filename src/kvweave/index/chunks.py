"""Cutting documents into chunks and finding cached ones in a prompt.

Cutting is a pure function of the document's token ids: a fixed grid from its own start. Lookup is by content, each chunk
on its own; a miss in the middle never hides a later hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvweave.core.keys import ChunkKey, ModelFingerprint, chunk_key
from kvweave.core.prompt import TokenPrompt
from kvweave.core.report import SegmentReport
from kvweave.errors import InvalidOption
from kvweave.store.base import ChunkRecord, ChunkStore


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
    """One chunk of a document: its tokens, and the anchor it is computed behind."""

    start: int
    token_ids: tuple[int, ...]
    anchor_ids: tuple[int, ...]
    key: ChunkKey


@dataclass(frozen=True)
class FoundChunk:
    """A cached chunk at [start, stop) of a prompt. ``exact``: everything in front of it is its anchor."""

    start: int
    stop: int
    record: ChunkRecord
    exact: bool
    border: bool


@dataclass(frozen=True)
class ChunkIndex:
    """Content-addressed lookup for one model and tenant over a store."""

    store: ChunkStore
    fingerprint: ModelFingerprint
    tenant: str
    chunking: Chunking = field(default_factory=Chunking)

    def pieces(self, token_ids: Sequence[int], anchor_ids: Sequence[int]) -> list[Piece]:
        """The chunks of a document behind an anchor."""
        ids, anchor = tuple(token_ids), tuple(anchor_ids)
        out = []
        for start, stop in self.chunking.cut(len(ids)):
            behind = anchor if self.chunking.isolated_pieces else anchor + ids[:start]
            key = chunk_key(ids[start:stop], behind, self.fingerprint, self.tenant)
            out.append(Piece(start, ids[start:stop], behind, key))
        return out

    def lookup(
        self, prompt: TokenPrompt, anchors: Sequence[tuple[int, ...]]
    ) -> tuple[list[FoundChunk], tuple[SegmentReport, ...]]:
        """All cached chunks of a prompt in order, from one batched store call, and a report per document.

        ``anchors``: what the chunks may have been computed behind; a record of an earlier one is preferred.
        """
        documents: list[_Placed] = []
        at = 0
        for span in prompt.spans:
            if span.document is not None:
                label = span.document.id or f"document-{len(documents)}"
                choices = tuple(zip(*(self.pieces(span.token_ids, a) for a in anchors), strict=True))
                documents.append(_Placed(label, at, at + len(span.token_ids), choices))
            at += len(span.token_ids)
        keys = [piece.key for d in documents for choice in d.choices for piece in choice]
        records = dict(zip(keys, self.store.get_many(keys), strict=True))
        found: list[FoundChunk] = []
        reports = []
        for document in documents:
            before = len(found)
            reason: str | None = "below_min"
            for choice in document.choices:
                hit = next((p for p in choice if _matches(records[p.key], p)), None)
                if hit is None:
                    reason = self.store.missing_reason(choice[0].key)
                else:
                    found.append(self._found(prompt, document.start + hit.start, hit, records[hit.key], found))
            hits = len(found) - before
            result = "miss" if not hits else "hit" if hits == len(document.choices) else "partial"
            reports.append(
                SegmentReport(document.label, document.start, document.stop, result, None if result == "hit" else reason)
            )
        return found, tuple(reports)

    def _found(
        self, prompt: TokenPrompt, start: int, piece: Piece, record: ChunkRecord | None, before: list[FoundChunk]
    ) -> FoundChunk:
        assert record is not None
        joined = piece.start > 0 and not self.chunking.isolated_pieces and _continues(before, start, piece)
        exact = prompt.token_ids[:start] == piece.anchor_ids
        return FoundChunk(start, start + len(piece.token_ids), record, exact, border=not joined)


def _continues(before: list[FoundChunk], start: int, piece: Piece) -> bool:
    """The chunk in front is the piece in front, computed behind the same anchor (its birth tells the anchor's length)."""
    if not before or before[-1].stop != start:
        return False
    previous = before[-1]
    return previous.record.birth + previous.stop - previous.start == len(piece.anchor_ids)


@dataclass(frozen=True)
class _Placed:
    """A document of a prompt: per piece, the chunk under every anchor."""

    label: str
    start: int
    stop: int
    choices: tuple[tuple[Piece, ...], ...]


def _matches(record: ChunkRecord | None, piece: Piece) -> bool:
    """A colliding key is a miss: the ids decide."""
    return record is not None and record.token_ids == piece.token_ids
