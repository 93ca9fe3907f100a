"""Formats whose calls are written like program code: ``[find(q="x", n=3)]``, and Gemma's ``call:find{q:..,n:3}``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvweave.tools.base import Block, Call, Tools
from kvweave.tools.json_calls import NotACall, dump, hidden_block, skip_closings

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)?\.?\d*(?:[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_QUOTES = ('"""', "'''", '"', "'", '<|"|>')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": "", "\\": "\\", '"': '"', "'": "'"}
_DEEPEST = 50


class _Incomplete(Exception):
    """The text ends in the middle of a value."""


class _Reader:
    """Reads values from ``at`` on; raises ``NotACall`` or ``_Incomplete``."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self._depth = 0

    def peek(self) -> str:
        """The next character that isn't white space."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if self.at == len(self.text):
            raise _Incomplete
        return self.text[self.at]

    def take(self, literal: str) -> bool:
        """Whether ``literal`` comes next; if so, it is read."""
        self.peek()
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        if literal.startswith(self.text[self.at :]):
            raise _Incomplete
        return False

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            raise NotACall

    def pattern(self, pattern: re.Pattern[str]) -> str:
        """Text of a pattern that something else must follow."""
        self.peek()
        found = pattern.match(self.text, self.at)
        if found is None or not found[0]:
            raise NotACall
        if found.end() == len(self.text):
            raise _Incomplete
        self.at = found.end()
        return found[0]

    def series(self, closing: str, item: Callable[[], Any]) -> list[Any]:
        """Items between commas up to ``closing``; a comma may come last."""
        items: list[Any] = []
        while not self.take(closing):
            items.append(item())
            if not self.take(","):
                self.expect(closing)
                break
        return items

    def value(self) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotACall
        try:
            return self._value()
        finally:
            self._depth -= 1

    def pairs(self, closing: str, between: str) -> dict[str, Any]:
        return dict(self.series(closing, lambda: self._pair(between)))

    def _value(self) -> Any:
        first = self.peek()
        if any(quote[0] == first for quote in _QUOTES):
            return self._string()
        if self.take("["):
            return self.series("]", self.value)
        if self.take("("):
            return self.series(")", self.value)
        if self.take("{"):
            return self.pairs("}", ":")
        if first.isalpha():
            word = self.pattern(_NAME).lower()
            if word not in _WORDS:
                raise NotACall
            return _WORDS[word]
        number = self.pattern(_NUMBER).replace("_", "")
        try:
            return int(number) if number.lstrip("+-").isdigit() else float(number)
        except ValueError as error:
            raise NotACall from error

    def _pair(self, between: str) -> tuple[str, Any]:
        key = self._string() if self.peek() in "\"'<" else self.pattern(_NAME)
        self.expect(between)
        return key, self.value()

    def _string(self) -> str:
        quote = next((q for q in _QUOTES if self.take(q)), None)
        if quote is None:
            raise NotACall
        parts: list[str] = []
        stops = re.compile(re.escape(quote) if quote == '<|"|>' else rf"\\|{re.escape(quote)}")
        while True:
            stop = stops.search(self.text, self.at)
            if stop is None:
                raise _Incomplete
            parts.append(self.text[self.at : stop.start()])
            self.at = stop.end()
            if stop[0] == quote:
                return "".join(parts)
            parts.append(self._escape())

    def _escape(self) -> str:
        if self.at >= len(self.text):
            raise _Incomplete
        letter = self.text[self.at]
        self.at += 1
        digits = {"x": 2, "u": 4, "U": 8}.get(letter)
        if digits is None:
            return _ESCAPES.get(letter, "\\" + letter)
        number = self.text[self.at : self.at + digits]
        if len(number) < digits:
            raise _Incomplete
        self.at += digits
        try:
            return chr(int(number, 16))
        except ValueError as error:
            raise NotACall from error


@dataclass(frozen=True)
class Pythonic:
    """A list of calls with named arguments, at the start of an answer or between marks."""

    marks: tuple[str, ...] = ("<|tool_call_start|>", "<|python_start|>")
    closings: tuple[str, ...] = ("<|tool_call_end|>", "<|python_end|>")
    starts: tuple[str, ...] = ("[",)

    @property
    def openings(self) -> tuple[str, ...]:
        return self.marks

    def read(self, text: str, final: bool, tools: Tools) -> Block | None:
        mark = next((m for m in self.marks if text.startswith(m)), "")
        reader = _Reader(text, len(mark))
        try:
            reader.expect("[")
            calls = tuple(reader.series("]", lambda: _python_call(reader)))
            if not calls:
                raise NotACall
        except _Incomplete:
            return None
        except NotACall:
            return Block(len(mark) or 1, content=mark or text[0])
        end = skip_closings(text, reader.at, self.closings, final) if mark else reader.at
        return None if end is None else Block(end, calls)


def _python_call(reader: _Reader) -> Call:
    name = reader.pattern(_NAME)
    reader.expect("(")
    return Call(name, dump(reader.pairs(")", "=")))


@dataclass(frozen=True)
class Gemma:
    """``<|tool_call>call:name{key:value}<tool_call|>``, strings between ``<|"|>``."""

    mark: str = "<|tool_call>"
    closing: str = "<tool_call|>"
    hidden: tuple[str, ...] = ("<|tool_response>",)
    starts: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.mark, *self.hidden)

    def read(self, text: str, final: bool, tools: Tools) -> Block | None:
        if text.startswith(self.hidden):
            return hidden_block(text, self.hidden)
        reader = _Reader(text, len(self.mark))
        try:
            reader.expect("call:")
            name = reader.pattern(_NAME)
            reader.expect("{")
            call = Call(name, dump(reader.pairs("}", ":")))
        except _Incomplete:
            return None
        except NotACall:
            return Block(len(self.mark), content=self.mark)
        end = skip_closings(text, reader.at, (self.closing,), final)
        return None if end is None else Block(end, (call,))
