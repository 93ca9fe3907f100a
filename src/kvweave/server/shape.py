"""The shape of a prompt: keyed hashes that tell where two prompts part, from which no text can be read back."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from blake3 import blake3

from kvweave.core.chat import Conversation, Message
from kvweave.core.keys import ModelFingerprint
from kvweave.core.prompt import TokenPrompt

STRIDE = 32
"""Tokens between two marks inside a piece."""
_DIGEST = 8  # bytes
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a prompt that belong together.

    ``kind``: template (its own text), system, message, or a segment's kind; only segments have a label. ``text`` is a digest
    of the whole text of the message.
    """

    kind: str
    start: int
    stop: int
    message: int | None = None
    segment: str | None = None
    text: str = ""


@dataclass(frozen=True)
class RequestShape:
    """What two prompts are compared by. Digests are keyed with a key of the tenant's, and mean nothing outside it."""

    pieces: tuple[Piece, ...]
    marks: tuple[str, ...]
    """Digest of all token ids in front of each of ``positions``."""
    model: str
    salt: str
    template: str
    tools: str
    system: str
    answers: tuple[str, ...] = ()
    """Digests of what was answered, once it was."""

    @classmethod
    def of(
        cls,
        prompt: TokenPrompt,
        *,
        key: bytes,
        fingerprint: ModelFingerprint,
        salt: str = "",
        template: str = "",
        conversation: Conversation | None = None,
        owners: Sequence[int | None] | None = None,
    ) -> RequestShape:
        """``owners``: the index of each token's message (None: the template's own text); None for a prompt without messages.

        ``key`` [32 bytes] is the tenant's, ``template`` the text of the chat template.
        """
        messages = () if conversation is None else conversation.messages
        texts = [_digest(key, "text", _text(message)) for message in messages]
        system = [text for text, message in zip(texts, messages, strict=True) if message.role in _SYSTEM]
        tools = [] if conversation is None else [dict(tool) for tool in conversation.tools]
        pieces = tuple(_Layout(owners, messages, texts).pieces(prompt))
        return cls(
            pieces=pieces,
            marks=_chain(key, prompt.token_ids, _positions(pieces)),
            model=fingerprint.short,
            salt=_digest(key, "salt", salt),
            template=_digest(key, "template", template),
            tools=_digest(key, "tools", json.dumps(tools, sort_keys=True)),
            system=_digest(key, "system", *system),
        )

    def answered(self, key: bytes, texts: Iterable[str]) -> RequestShape:
        """The same prompt, now that its answers are known."""
        return replace(self, answers=tuple(_digest(key, "text", text.strip()) for text in texts))

    @property
    def num_tokens(self) -> int:
        return self.pieces[-1].stop if self.pieces else 0

    @property
    def context(self) -> str:
        """What must agree before anything at all can be reused."""
        return f"{self.model}/{self.salt}"

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Where the marks stand: every ``STRIDE`` tokens, and where a piece ends."""
        return _positions(self.pieces)

    def landmarks(self) -> list[tuple[int, str]]:
        """Marks by which similar prompts are found, with how many tokens they stand for.

        Ends of pieces, ``STRIDE`` times the powers of two, and texts of messages: those tell nothing of what is in front.
        """
        stops = {piece.stop for piece in self.pieces}
        marks = zip(self.positions, self.marks, strict=True)
        found = [(at, mark) for at, mark in marks if at in stops or (at % STRIDE == 0 and (at // STRIDE).bit_count() == 1)]
        return [(0, text) for text in dict.fromkeys(p.text for p in self.pieces) if text] + found

    def common(self, other: RequestShape) -> int:
        """Leading tokens that are known to be the same: at most ``STRIDE`` - 1 too few inside a piece, never too many."""
        theirs = dict(zip(other.positions, other.marks, strict=True))
        same = (at for at, mark in zip(self.positions, self.marks, strict=True) if theirs.get(at) == mark)
        return max(same, default=0)

    def piece_at(self, token: int) -> Piece:
        """The piece a token belongs to; the last one for those behind the prompt."""
        index = bisect_right([piece.start for piece in self.pieces], token) - 1
        return self.pieces[max(0, index)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"marks": "".join(self.marks)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> RequestShape:
        marks, size = stored["marks"], 2 * _DIGEST
        parsed = {
            "pieces": tuple(Piece(**piece) for piece in stored["pieces"]),
            "marks": tuple(marks[i : i + size] for i in range(0, len(marks), size)),
            "answers": tuple(stored["answers"]),
        }
        return cls(**stored | parsed)


@dataclass(frozen=True)
class _Layout:
    """Who the tokens of a prompt belong to."""

    owners: Sequence[int | None] | None
    messages: Sequence[Message]
    texts: Sequence[str]

    def pieces(self, prompt: TokenPrompt) -> Iterator[Piece]:
        """Runs of tokens of one span and one owner."""
        at = documents = 0
        for span in prompt.spans:
            kind, label = "", None
            if span.document is not None:
                kind, label = span.document.kind, span.document.id or f"document-{documents}"
                documents += 1
            for owner, run in groupby(range(at, at + len(span.token_ids)), key=self._owner):
                stop = at + sum(1 for _ in run)
                text = self.texts[owner] if owner is not None and owner < len(self.texts) else ""
                yield Piece(kind or self._kind(owner), at, stop, owner, label, text)
                at = stop

    def _owner(self, token: int) -> int | None:
        return None if self.owners is None else self.owners[token]

    def _kind(self, owner: int | None) -> str:
        if self.owners is None:
            return "message"
        if owner is None or owner >= len(self.messages):  # the generation prompt belongs to the message to come
            return "template"
        return "system" if self.messages[owner].role in _SYSTEM else "message"


def _positions(pieces: Sequence[Piece]) -> tuple[int, ...]:
    stops = {piece.stop for piece in pieces}
    return tuple(sorted(stops | set(range(STRIDE, max(stops, default=0), STRIDE))))


def _chain(key: bytes, token_ids: Sequence[int], positions: Sequence[int]) -> tuple[str, ...]:
    hasher, marks, at = blake3(key=key), [], 0
    for position in positions:
        hasher.update(np.asarray(token_ids[at:position], dtype="<u4").tobytes())
        marks.append(hasher.digest(length=_DIGEST).hex())
        at = position
    return tuple(marks)


def _text(message: Message) -> str:
    content = message.content or ""
    parts = [content] if isinstance(content, str) else [c if isinstance(c, str) else c.content for c in content]
    return "\n".join(parts).strip()


def _digest(key: bytes, what: str, *values: str) -> str:
    """Length-prefixed, so that no two lists of values share a byte string."""
    hasher = blake3(key=key)
    for value in (what, *values):
        data = value.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest(length=_DIGEST).hex()
