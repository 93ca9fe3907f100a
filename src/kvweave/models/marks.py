"""Marks in a rendered text: they survive a chat template, and come off again without a trace."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The Unicode noncharacters of the basic plane: no text that means anything has them.
_NONCHARACTERS = (*map(chr, range(0xFDD0, 0xFDF0)), "\ufffe", "\uffff")

BEGIN, END = "b", "e"  # of a segment
OWNER, LEAVE = "o", "l"  # text of a message begins, ends; an owner without number is nobody


@dataclass(frozen=True)
class Mark:
    """At character ``at`` of the text without marks. ``number``: of the segment or message."""

    at: int
    kind: str
    number: int | None


@dataclass(frozen=True)
class Span:
    """Characters ``start`` to ``end`` of a text, and the number of the segment or message they belong to."""

    start: int
    end: int
    number: int | None


@dataclass(frozen=True)
class Marks:
    """A mark is ``left``, its kind and number, ``right``: two noncharacters that the text itself doesn't have."""

    left: str
    right: str

    @classmethod
    def absent_from(cls, text: str) -> Marks | None:
        """Marks for a text; None if it has nearly all noncharacters."""
        free = [c for c in _NONCHARACTERS if c not in text]
        return cls(free[0], free[1]) if len(free) > 1 else None

    def mark(self, kind: str, number: int | None = None) -> str:
        return f"{self.left}{kind}{'' if number is None else number}{self.right}"

    def around(self, text: str, number: int) -> str:
        """Segment ``number``: marks inside the white space around it, so that a template that trims doesn't see them."""
        core = text.strip()
        before, _, after = text.partition(core)
        return f"{before}{self.mark(BEGIN, number)}{core}{self.mark(END, number)}{after}"

    def read(self, marked: str) -> tuple[str, list[Mark]]:
        """The text without marks, and where they were."""
        pieces, marks = [], []
        length = last = 0
        for found in re.finditer(f"{self.left}([a-z])([0-9]*){self.right}", marked):
            pieces.append(marked[last : found.start()])
            length += len(pieces[-1])
            last = found.end()
            marks.append(Mark(length, found[1], int(found[2]) if found[2] else None))
        return "".join([*pieces, marked[last:]]), marks


def segment_spans(marks: list[Mark], count: int) -> list[Span] | None:
    """Segments 0 to ``count - 1`` in the order of the text; None unless each is there once and none inside another."""
    edges = [m for m in marks if m.kind in (BEGIN, END)]
    spans = [Span(a.at, b.at, a.number) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    pairs = [(m.kind, m.number) for m in edges]
    if pairs != [edge for s in spans for edge in ((BEGIN, s.number), (END, s.number))]:
        return None
    return spans if sorted(s.number for s in spans if s.number is not None) == list(range(count)) else None


def owner_spans(marks: list[Mark], length: int) -> list[Span]:
    """Who owns each stretch of a text of ``length`` characters: None in front of the first owner, else the last one.

    Of marks inside others the outermost owner counts: what a macro writes belongs to the message it was called for.
    """
    spans: list[Span] = []
    open_owners: list[int | None] = []
    owner, start = None, 0
    for mark in (m for m in marks if m.kind in (OWNER, LEAVE)):
        if mark.kind == OWNER:
            open_owners.append(mark.number)
        elif open_owners:
            open_owners.pop()
        now = next((o for o in open_owners if o is not None), owner)
        if now != owner:
            spans.append(Span(start, mark.at, owner))
            owner, start = now, mark.at
    spans.append(Span(start, length, owner))
    return [s for s in spans if s.start < s.end]
