"""What the server wants of a parser that tells tool calls from text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """``id`` and ``name`` in the first piece of a call alone."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    content: str | None
    tool_calls: tuple[ToolCall, ...]


class StreamingToolParser(Protocol):
    def push(self, text: str) -> Sequence[ContentDelta | ToolCallDelta]: ...

    def flush(self) -> Sequence[ContentDelta | ToolCallDelta]: ...


class ToolParser(Protocol):
    needs_special_tokens: bool

    def parse(self, text: str) -> ParsedAnswer: ...

    def stream(self) -> StreamingToolParser: ...
