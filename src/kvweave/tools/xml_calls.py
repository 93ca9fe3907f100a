"""Formats whose calls are tags, with a tag for each argument; types come from the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvweave.tools.base import Block, Call, Tools
from kvweave.tools.json_calls import NotACall, dump, skip_closings, skip_space

_LONGEST_TAG = 256
_WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True)
class XmlCalls:
    """``function``, then ``parameter``s, then ``end``; one or several of that, perhaps inside a pair of ``outer`` tags.

    Args:
        mark: what ``function`` begins with.
        function: a pattern with the group ``name``.
        parameter: a pattern with the groups ``key`` and ``value``, and perhaps ``text`` (whether the value is text). A value
            may hold anything, so it only matches where the next parameter or ``end`` is in sight.
        argument: what ``parameter`` begins with.
    """

    mark: str
    function: re.Pattern[str]
    argument: str
    parameter: re.Pattern[str]
    end: str
    outer: tuple[tuple[str, str], ...] = ()
    starts: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.mark, *(opening for opening, _ in self.outer))

    def read(self, text: str, final: bool, tools: Tools) -> Block | None:
        outer, closing = next((pair for pair in self.outer if text.startswith(pair[0])), ("", ""))
        calls: list[Call] = []
        end, begin = 0, skip_space(text, len(outer))
        try:
            while text.startswith(self.mark, begin) and (outer or not calls):
                found = self._function(text, begin, tools)
                if found is None:
                    return Block(end, tuple(calls)) if final and calls else None
                end = found[0]
                calls.append(found[1])
                begin = skip_space(text, end)
            if outer and not final and self.mark.startswith(text[begin:]):
                return None
            if not calls:
                raise NotACall
        except NotACall:
            return Block(end, tuple(calls)) if calls else Block(len(outer or self.mark), content=outer or self.mark)
        closed = skip_closings(text, end, (closing,) if closing else (), final)
        return None if closed is None else Block(closed, tuple(calls))

    def _function(self, text: str, at: int, tools: Tools) -> tuple[int, Call] | None:
        """End of the call that begins at ``at``, and the call; None if it isn't complete. Raises ``NotACall``."""
        head = self.function.match(text, at, at + _LONGEST_TAG)
        if head is None:
            if len(text) < at + _LONGEST_TAG:
                return None
            raise NotACall
        name, at = head["name"].strip(), head.end()
        properties = _properties(tools, name)
        arguments: dict[str, Any] = {}
        while True:
            at = skip_space(text, at)
            if text.startswith(self.end, at):
                return at + len(self.end), Call(name, dump(arguments))
            parameter = self.parameter.match(text, at)
            if parameter is None:
                rest = text[at:]
                if self.end.startswith(rest) or rest.startswith(self.argument) or self.argument.startswith(rest):
                    return None
                raise NotACall
            key, at = parameter["key"].strip(), parameter.end()
            arguments[key] = _typed(parameter["value"], properties.get(key), parameter.groupdict().get("text"))


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _types(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        named = schema.get("type")
        yield from [named] if isinstance(named, str) else named or ()
        for key in ("anyOf", "oneOf", "allOf"):
            for option in schema.get(key) or ():
                yield from _types(option)


def _typed(value: str, schema: Any, is_text: str | None) -> Any:
    """The value of an argument: text if the schema or the tag says so, else JSON where it is JSON."""
    text = value.removeprefix("\n").removesuffix("\n")
    types = set(_types(schema))
    if is_text == "true" or types == {"string"}:
        return text
    word = text.strip().lower()
    if "string" in types and not (word in ("null", "none") and "null" in types):
        return text
    if word in _WORDS:
        return _WORDS[word]
    try:
        parsed = json.loads(text)
        json.dumps(parsed, allow_nan=False)
    except (ValueError, RecursionError):  # whatever else it is, it is a text
        return text
    return parsed


def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


QWEN_CODER = XmlCalls(
    mark="<function=",
    function=_pattern(r"<function=(?P<name>[^>\s]+)>"),
    argument="<parameter=",
    parameter=_pattern(r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|</function>))"),
    end="</function>",
    outer=(("<tool_call>", "</tool_call>"), ("<seed:tool_call>", "</seed:tool_call>")),
)

GLM = XmlCalls(
    mark="<tool_call>",
    function=_pattern(r"<tool_call>\s*(?P<name>[\w.-]+)\s*(?=<arg_key>|</tool_call>)"),
    argument="<arg_key>",
    parameter=_pattern(
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>))"
    ),
    end="</tool_call>",
)


def _invoke(tag: str, *outer: str) -> XmlCalls:
    """``<invoke name="..."><parameter name="...">...</parameter></invoke>`` with a prefix ``tag`` in every tag."""
    prefix = re.escape(tag)
    return XmlCalls(
        mark=f"<{tag}invoke name=",
        function=_pattern(rf'<{prefix}invoke name="(?P<name>[^">]+)"\s*>'),
        argument=f"<{tag}parameter",
        parameter=_pattern(
            rf'<{prefix}parameter name="(?P<key>[^">]+)"(?:\s+string="(?P<text>true|false)")?\s*>(?P<value>.*?)'
            rf"</{prefix}parameter>(?=\s*(?:<{prefix}parameter|</{prefix}invoke>))"
        ),
        end=f"</{tag}invoke>",
        outer=tuple((f"<{name}>", f"</{name}>") for name in outer),
    )


DEEPSEEK_DSML = _invoke("｜DSML｜", "｜DSML｜function_calls", "｜DSML｜tool_calls")
MINIMAX = _invoke("", "minimax:tool_call")
