"""Tool calls in the text of an answer: a format finds them, the same parser reads whole answers and streams."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Sequence[Mapping[str, Any]]
"""OpenAI's tool definitions: some formats need them to tell numbers from texts."""


@dataclass(frozen=True)
class ToolCall:
    """``arguments``: JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """``content`` is None if there is nothing beside calls."""

    content: str | None
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of call number ``index``: ``id`` and ``name`` in the first one, then ``arguments``."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Call:
    """A call as a format finds it; ``id`` where the model writes one that has to come back."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Block:
    """The first ``length`` characters of a text are ``calls``, and ``content`` (empty for marks that nobody should see)."""

    length: int
    calls: tuple[Call, ...] = ()
    content: str = ""


class Format(Protocol):
    """How a family of models writes calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What a block begins with, anywhere in an answer."""

    @property
    def starts(self) -> tuple[str, ...]:
        """What a block begins with at the start of an answer, and behind another block."""

    def read(self, text: str, final: bool, tools: Tools) -> Block | None:
        """The block that ``text`` begins with (at an opening or start); None while the rest of it may be yet to come.

        What is returned doesn't depend on text behind the block. ``final``: nothing more comes. A block that turns out to be
        no call is content, of at least one character.
        """


@dataclass(frozen=True)
class ToolParser:
    """A parser by name. ``needs_special_tokens``: its marks may be special tokens, so decoding must not skip them."""

    name: str
    format: Format
    needs_special_tokens: bool = True
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"

    def parse(self, text: str, tools: Tools = ()) -> ParsedAnswer:
        """A whole answer. Never raises: what isn't a call is content."""
        stream = self.stream(tools)
        content: list[str] = []
        calls: list[ToolCall] = []
        for delta in (*stream.push(text), *stream.flush()):
            if isinstance(delta, ContentDelta):
                content.append(delta.text)
            elif delta.id is not None and delta.name is not None:
                calls.append(ToolCall(delta.id, delta.name, ""))
            else:
                last = calls[delta.index]
                calls[delta.index] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
        return ParsedAnswer("".join(content) or (None if calls else ""), tuple(calls))

    def stream(self, tools: Tools = ()) -> StreamingToolParser:
        return StreamingToolParser(self, tools)


class StreamingToolParser:
    """Pieces of an answer in, pieces of content and calls out. A call comes out once it is complete and known to be one.

    However the text is cut, the deltas together are what ``ToolParser.parse`` makes of all of it.
    """

    def __init__(self, parser: ToolParser, tools: Tools) -> None:
        self._parser = parser
        self._format = parser.format
        self._tools = tools
        self._pending = ""
        self._read = 0  # characters of ``_pending`` that are no whole block
        self._space = ""  # white space that is content only if other content follows
        self._fresh = True  # no content so far but white space
        self._calls = 0

    def push(self, text: str) -> list[ContentDelta | ToolCallDelta]:
        self._pending += text
        if self._read and not _ENDS.search(self._pending, self._read):
            return []  # a long call is not read again for every token
        return self._advance(final=False)

    def flush(self) -> list[ContentDelta | ToolCallDelta]:
        """The answer is over: what was held back is content, or a call without its end."""
        deltas = self._advance(final=True)
        if self._space and not self._calls:
            deltas.append(ContentDelta(self._space))
        self._space = ""
        return deltas

    def _advance(self, final: bool) -> list[ContentDelta | ToolCallDelta]:
        deltas: list[ContentDelta | ToolCallDelta] = []
        while self._pending:
            start, complete = self._find(final)
            deltas += self._content(self._pending[:start])
            self._pending, self._read = self._pending[start:], 0
            if not self._pending or not complete:
                break
            block = self._format.read(self._pending, final, self._tools)
            if block is None and not final:
                self._read = len(self._pending)
                break
            block = block or Block(1, content=self._pending[0])
            deltas += self._content(block.content)
            deltas += self._call_deltas(block.calls)
            self._pending = self._pending[block.length :]
        return deltas

    def _find(self, final: bool) -> tuple[int, bool]:
        """Where the first block may begin, and whether all of its opening is there."""
        text = self._pending
        if self._fresh:
            at = len(text) - len(text.lstrip())
            if text.startswith(self._format.starts, at):
                return at, True
            if not final and any(s.startswith(text[at:]) for s in self._format.starts):
                return at, False
        openings = self._format.openings
        places = [at for o in openings if (at := text.find(o)) >= 0]
        first = min(places, default=len(text))
        if not final:
            longest = max(map(len, openings), default=0)
            for at in range(max(0, len(text) - longest + 1), first):
                if any(o.startswith(text[at:]) for o in openings):
                    return at, False
        return first, bool(places)

    def _content(self, text: str) -> list[ContentDelta | ToolCallDelta]:
        text, self._space = self._space + text, ""
        shown = text.rstrip()
        if not shown:
            self._space = text
            return []
        self._space = text[len(shown) :]
        self._fresh = False
        return [ContentDelta(shown)]

    def _call_deltas(self, calls: tuple[Call, ...]) -> list[ContentDelta | ToolCallDelta]:
        deltas: list[ContentDelta | ToolCallDelta] = []
        for call in calls:
            deltas.append(ToolCallDelta(self._calls, call.id or self._parser.new_id(), call.name, ""))
            deltas.append(ToolCallDelta(self._calls, None, None, call.arguments))
            self._calls += 1
        return deltas


_ENDS = re.compile(r"[}\])>|]")  # a block ends with one of these, or with the answer
