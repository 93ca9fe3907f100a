"""Marked texts of a request: from content parts, documents and prompt segments to ``Document``s and pins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvweave.core.prompt import Document
from kvweave.errors import ConflictingFields, InvalidRequest
from kvweave.protocol import later
from kvweave.protocol.bodies import DocumentBody, Part
from kvweave.protocol.cache import DEFAULT_PIN, Pin, check_span
from kvweave.protocol.cache_bodies import Mark
from kvweave.protocol.limits import Limits


@dataclass
class Segments:
    """Collects the marked texts of one request, and refuses what they contradict each other in."""

    limits: Limits
    pins: list[Pin] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)
    _count: int = 0

    def part(self, part: Part, message: int, index: int) -> str | Document:
        """What a content part is in a conversation."""
        path = f"messages[{message}].content[{index}]"
        control, breakpoint_ = part.cache_control, part.prompt_cache_breakpoint
        names = [n for n in ("cache", "cache_control", "prompt_cache_breakpoint") if getattr(part, n) is not None]
        if len(names) > 1:
            raise ConflictingFields(
                f"{path}: {names[0]} and {names[1]} are two spellings of one thing. Send only {names[0]}.",
                param=f"{path}.{names[1]}",
            )
        if hint := control or breakpoint_:
            life = DEFAULT_PIN if hint.ttl is None else hint.ttl
            self.pins.append(
                Pin(check_span(life, f"{path}.{names[0]}.ttl", self.limits), strict=False, message=message, part=index)
            )
        return part.text if part.cache is None else self.marked(part.text, part.cache, path)

    def marked(self, text: str, mark: Mark, path: str, *, title: str | None = None) -> str | Document:
        """A text with a mark. White space alone is nothing to cache, and stays text."""
        later.refuse_kind(mark.kind, f"{path}.cache.kind")
        document = Document(text, id=mark.segment, title=title, kind=mark.kind)
        self._count += 1
        if self._count > self.limits.segments:
            raise InvalidRequest(
                f"{path}: more than {self.limits.segments:,} segments. Join some, or leave marks out.", param=path
            )
        if document.id is not None and self._texts.setdefault(document.id, document.content) != document.content:
            raise InvalidRequest(
                f"{path}: the label '{document.id}' stands on two texts. Give each text a label of its own.",
                param=f"{path}.cache.segment",
            )
        if mark.pin is not None:
            life = check_span(mark.pin, f"{path}.cache.pin", self.limits)
            self.pins.append(Pin(life, strict=True, document=document))
        return document if document.content else text

    def documents(self, bodies: Sequence[DocumentBody]) -> tuple[Document, ...]:
        """The request's ``documents``, each a segment of its own."""
        found = []
        for i, body in enumerate(bodies):
            path = f"documents[{i}]"
            mark = body.cache or Mark()
            if mark.kind != "document":
                raise InvalidRequest(
                    f"{path}.cache.kind: '{mark.kind}' is not for documents. Leave it out.", param=f"{path}.cache.kind"
                )
            if mark.segment is None and body.doc_id is not None:
                mark = mark.model_copy(update={"segment": f"doc:{body.doc_id}"})
            segment = self.marked(body.text, mark, path, title=body.title)
            if isinstance(segment, Document):
                found.append(segment)
        return tuple(found)
