"""What a caller hands in: segments, in order. Validation of user input happens here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvweave.errors import InvalidRequest

KINDS = ("document", "text")
_LABEL = re.compile(r"[A-Za-z0-9._:@-]{1,128}")


@dataclass(frozen=True)
class Document:
    """A text whose KV may be reused wherever it stands in a prompt.

    ``title`` becomes the first line of the text. ``id`` is a label for reports; identity is the content. ``kind``:
    ``document``, or ``text`` for a passage that is named (listed, explained) but never reused out of its place.
    """

    text: str
    id: str | None = None
    title: str | None = None
    kind: str = "document"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidRequest(f"Document.text: expected a string, got {type(self.text).__name__}. Pass its text.")
        check_text(self.content, "Document.text")
        if self.kind not in KINDS:
            raise InvalidRequest(f"Document.kind {self.kind!r} is unknown. Use {' or '.join(KINDS)}.")
        if self.id is not None and not _LABEL.fullmatch(self.id):
            raise InvalidRequest(
                f"Document id {self.id!r} is not a label. Use 1 to 128 of the characters A-Z a-z 0-9 . _ : @ -"
            )

    @property
    def content(self) -> str:
        """The text as it enters a prompt: white space around it is not part of a document's identity."""
        return (f"{self.title}\n{self.text}" if self.title else self.text).strip()


def check_text(text: str, where: str) -> None:
    """Raise ``InvalidRequest`` for text no tokenizer takes: halves of surrogate pairs, left by a broken decoder."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{where} has half a surrogate pair at character {error.start}. Decode the text as UTF-8 first."
        ) from error


Segment = str | Document


@dataclass(frozen=True)
class Prompt:
    """A prompt as a sequence of segments: plain strings (always computed or matched exactly) and documents.

    Each segment is tokenised alone; the prompt is the concatenation of the ids, whatever technique runs. ``add_bos``: a
    token for the beginning of the text is put in front where the model has one and the text doesn't; chat templates write
    all there is to write.
    """

    segments: tuple[Segment, ...]
    add_bos: bool

    def __init__(self, segments: Sequence[Segment], *, add_bos: bool = True) -> None:
        if isinstance(segments, str | Document):
            segments = (segments,)
        object.__setattr__(self, "segments", tuple(segments))
        object.__setattr__(self, "add_bos", add_bos)
        for i, segment in enumerate(self.segments):
            if not isinstance(segment, str | Document):
                raise InvalidRequest(
                    f"segments[{i}]: expected a string or a Document, got {type(segment).__name__}. Wrap texts in Document."
                )
            if isinstance(segment, str):
                check_text(segment, f"segments[{i}]")
        if not any(s if isinstance(s, str) else s.content for s in self.segments):
            raise InvalidRequest("The prompt is empty. Give at least one non-empty segment.")

    @property
    def documents(self) -> tuple[Document, ...]:
        return tuple(s for s in self.segments if isinstance(s, Document))


@dataclass(frozen=True)
class TokenSpan:
    """A segment after tokenisation: its ids and, for a document, which one it came from."""

    token_ids: tuple[int, ...]
    document: Document | None = None


@dataclass(frozen=True)
class TokenPrompt:
    """A tokenised prompt. ``spans`` concatenated are the prompt's ids."""

    spans: tuple[TokenSpan, ...]
    token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(t for s in self.spans for t in s.token_ids))

    @property
    def head_ids(self) -> tuple[int, ...]:
        """Ids in front of the first document (all ids if there is none): the ``head`` anchor."""
        ids: list[int] = []
        for span in self.spans:
            if span.document is not None:
                break
            ids.extend(span.token_ids)
        return tuple(ids)
