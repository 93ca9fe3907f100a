"""Formats whose calls are JSON: objects between marks, or a name and then its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvweave.tools.base import Block, Call, Tools

_DECODER = json.JSONDecoder(strict=False)  # models write real new lines into strings
_LONGEST_HEADER = 256


class NotACall(Exception):
    """The text is no call, whatever follows."""


def read_value(text: str, at: int, closing: str = "") -> tuple[Any, int] | None:
    """The JSON object or list at ``at`` and where it ends; None if it isn't complete. Raises ``NotACall``.

    ``closing`` is what must not come before its end, outside of strings.
    """
    at = skip_space(text, at)
    if at < len(text) and text[at] not in "{[":
        raise NotACall
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        closed = text.find(closing, at) if closing else -1
        if error.pos < closed and not error.msg.startswith("Unterminated string"):
            raise NotACall from error
    except (ValueError, RecursionError):  # a number or a nesting beyond what Python reads: never complete
        pass
    return None


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def skip_closings(text: str, at: int, closings: tuple[str, ...], final: bool) -> int | None:
    """The place behind those of ``closings`` that follow in this order; None if that can't be told yet."""
    for closing in closings:
        begin = skip_space(text, at)
        if text.startswith(closing, begin):
            at = begin + len(closing)
        elif not final and closing.startswith(text[begin:]):
            return None
    return at


def dump(arguments: Mapping[str, Any]) -> str:
    """Raises ``NotACall`` for what JSON doesn't have: NaN and infinity."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NotACall from error
    # Halves of surrogate pairs can't be sent as they are.
    return json.dumps(arguments) if any("\ud800" <= c <= "\udfff" for c in text) else text


def calls_of(value: Any) -> tuple[Call, ...]:
    """Calls in an object or a list of objects; raises ``NotACall``."""
    if isinstance(value, list) and value:
        return tuple(_call(item) for item in value)
    return (_call(value),)


def _call(value: Any) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise NotACall
    name = value.get("name", value.get("tool_name"))
    arguments: Any = next((value[key] for key in ("arguments", "parameters", "args") if key in value), {})
    if isinstance(arguments, str):  # JSON inside JSON
        try:
            arguments = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError) as error:
            raise NotACall from error
    if not isinstance(name, str) or not name or not name.isprintable() or not isinstance(arguments or {}, dict):
        raise NotACall
    return Call(name, dump(arguments or {}))


@dataclass(frozen=True)
class MarkedJson:
    """An opening, then one or more objects or lists of objects with name and arguments, then perhaps ``closings``.

    ``starts``: openings that count at the start of an answer only; a bracket among them belongs to the JSON. ``separator``
    stands between objects. ``hidden`` marks are dropped.
    """

    marks: tuple[str, ...]
    closings: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    separator: str = ""
    hidden: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        return self.marks + self.hidden

    def read(self, text: str, final: bool, tools: Tools) -> Block | None:
        if text.startswith(self.hidden):
            return hidden_block(text, self.hidden)
        opening = next(o for o in self.marks + self.starts if text.startswith(o))
        calls: list[Call] = []
        end, at = 0, 0 if opening in "{[" else len(opening)
        try:
            while True:
                found = read_value(text, at, self.closings[0] if self.closings else "")
                if found is None:
                    return Block(end, tuple(calls)) if final and calls else None
                calls += calls_of(found[0])
                end = found[1]
                after = self._after(text, end, final)
                if after is None:
                    return None
                if not text.startswith("{", after):
                    return Block(after, tuple(calls))
                at = after
        except NotACall:
            return Block(end, tuple(calls)) if calls else Block(len(opening), content=opening)

    def _after(self, text: str, end: int, final: bool) -> int | None:
        """The next object, or the end of the block; None if that can't be told yet."""
        if not self.closings and not self.separator:
            return end
        separators = (self.separator,) if self.separator else ()
        more = skip_closings(text, end, separators, final)
        if more is not None and (bool(more > end) or not separators):
            more = skip_space(text, more)
            if text.startswith("{", more):
                return more
            if more == len(text) and not final:
                return None
        return skip_closings(text, end, (*separators, *self.closings), final)


@dataclass(frozen=True)
class NamedJson:
    """``mark``, a header with the group ``name`` (and perhaps ``id``), an object of arguments, then perhaps ``closings``."""

    mark: str
    header: re.Pattern[str]
    closings: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.mark, *self.hidden)

    def read(self, text: str, final: bool, tools: Tools) -> Block | None:
        if text.startswith(self.hidden):
            return hidden_block(text, self.hidden)
        begin = len(self.mark)
        brace = text.find("{", begin, begin + _LONGEST_HEADER)
        if brace < 0 and len(text) < begin + _LONGEST_HEADER:
            return None
        header = self.header.fullmatch(text, begin, max(brace, begin))
        try:
            found = read_value(text, brace, self.closings[-1] if self.closings else "") if header else None
            if header is None:
                raise NotACall
            if found is None:
                return None
            call = Call(header["name"], dump(found[0]), header.groupdict().get("id"))
        except NotACall:
            return Block(begin, content=self.mark)
        end = skip_closings(text, found[1], self.closings, final)
        return None if end is None else Block(end, (call,))


@dataclass(frozen=True)
class Mistral:
    """``[TOOL_CALLS]`` with a list of objects, or with a name and arguments."""

    objects = MarkedJson(("[TOOL_CALLS]",))
    named = NamedJson("[TOOL_CALLS]", re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"))
    openings = objects.openings
    starts: tuple[str, ...] = ()

    def read(self, text: str, final: bool, tools: Tools) -> Block | None:
        at = skip_space(text, len(self.named.mark))
        if at == len(text):
            return None
        return (self.objects if text[at] in "[{" else self.named).read(text, final, tools)


def hidden_block(text: str, hidden: tuple[str, ...]) -> Block:
    return Block(next(len(mark) for mark in hidden if text.startswith(mark)))
