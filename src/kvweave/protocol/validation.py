"""From any JSON value to a checked body: what is wrong comes out as one typed error that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from kvweave.errors import (
    ConflictingFields,
    InvalidRequest,
    RequestError,
    UnknownCacheField,
    UnsupportedContent,
    UnsupportedParameter,
)

MAX_DEPTH = 100
"""Levels of lists and objects: templates and JSON encoders recurse."""

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str | int, ...]

_ERRORS: dict[str, type[RequestError]] = {
    error.code: error
    for error in (InvalidRequest, UnsupportedParameter, UnsupportedContent, UnknownCacheField, ConflictingFields)
}
_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_RANGES = {
    "greater_than_equal": ("ge", "{:g} or more"),
    "greater_than": ("gt", "a number above {:g}"),
    "less_than_equal": ("le", "at most {:g}"),
    "literal_error": ("expected", "{}"),
    "string_pattern_mismatch": ("pattern", "a string that matches {}"),
}
_LENGTHS = {
    "too_long": ("max_length", "at most {} entries"),
    "too_short": ("min_length", "at least {} entries"),
    "string_too_long": ("max_length", "at most {} characters"),
    "string_too_short": ("min_length", "at least {} characters"),
}


def validate(model: type[Model], value: object, where: str = "") -> Model:
    """``value`` as a ``model``. Raises the ``RequestError`` of what is wrong first; its ``param`` begins with ``where``."""
    check_json(value, where)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        refusal = _translate(error.errors(include_url=False, include_input=False), value, where)
    raise refusal


def refuse(error: type[RequestError], message: str, key: str | None = None) -> PydanticCustomError:
    """For validators to raise. In ``message`` ``{path}`` is the field, or its ``key``, and ``{parent}`` what it is in."""
    return PydanticCustomError(error.code, "{message}", {"message": message, "key": key})


def check_json(value: object, where: str = "") -> None:
    """Raise ``InvalidRequest`` for what some JSON parsers let through and nothing behind can use.

    Halves of surrogate pairs, NaN and infinities, keys that aren't strings, deep nesting.
    """
    stack: list[tuple[object, Path]] = [(value, ())]
    while stack:
        item, path = stack.pop()
        if isinstance(item, str):
            _check_text(item, path, where)
        elif isinstance(item, float) and not math.isfinite(item):
            raise _invalid(show_path(path, where), "expected a finite number. Leave it out if there is none.")
        elif isinstance(item, Mapping | list):
            if len(path) > MAX_DEPTH:
                raise _invalid(show_path(path[:1], where), f"nested deeper than {MAX_DEPTH} levels. Send a flatter value.")
            if isinstance(item, Mapping):
                for key in item:
                    if not isinstance(key, str):
                        raise _invalid(show_path(path, where), f"the key {describe(key)} is not a string.")
                    _check_text(key, path, where)
                stack.extend((child, (*path, key)) for key, child in item.items())
            else:
                stack.extend((child, (*path, i)) for i, child in enumerate(item) if not isinstance(child, int))


def _check_text(text: str, path: Path, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(
            show_path(path, where),
            f"half a surrogate pair at character {error.start}. Decode the text as UTF-8 before you send it.",
        ) from None


def _invalid(path: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{path or 'The body'}: {message}", param=path or None)


def show_path(path: Path, where: str = "") -> str:
    """``messages[2].content[1].text``."""
    shown = where
    for step in path:
        if isinstance(step, int):
            shown += f"[{step}]"
        else:
            shown += f".{clip(step)}" if shown else clip(step)
    return shown


def clip(text: str, length: int = 60) -> str:
    """A name from outside, safe to show: printable ASCII, cut to ``length`` characters."""
    safe = ascii(text)[1:-1]
    return safe if len(safe) <= length else safe[: length - 3] + "..."


def describe(value: object) -> str:
    """A value for an error message. Strings aren't shown: they may be somebody's text."""
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge integer"
    return clip(repr(value), 24)


def _translate(details: list[ErrorDetails], value: object, where: str) -> RequestError:
    """The first error in our words. Of a union's errors those count that got furthest into the value."""
    found = [(_real_path(detail["loc"], value), detail) for detail in details]
    first = found[0][0]
    path = max((p for p, _ in found if p[: len(first)] == first), key=len)
    at_place = [d for p, d in found if p == path]
    # Where a value has the type of one member of a union, it isn't told about the others.
    detail = next((d for d in at_place if d["type"] not in _TYPES), at_place[0])
    if detail["type"] in _ERRORS:
        return _refusal(detail, path, where)
    if detail["type"] == "missing":
        shown = show_path((*path, str(detail["loc"][-1])), where)
        return InvalidRequest(f"{shown} is missing. Add it.", param=shown)
    expected = [_expected(d) for d in at_place] if detail["type"] in _TYPES else [_expected(detail)]
    got = _got(detail, path[-1] if detail["loc"][-1:] == ("[key]",) else _at(value, path))
    return _invalid(
        show_path(path, where),
        f"expected {' or '.join(dict.fromkeys(expected))}, got {got}. Correct it or leave it out.",
    )


def _refusal(detail: ErrorDetails, path: Path, where: str) -> RequestError:
    context = detail["ctx"]
    parent = path
    if context["key"] is not None:
        path = (*path, context["key"])
    shown = show_path(path, where)
    message = context["message"].replace("{path}", shown).replace("{parent}", show_path(parent, where))
    return _ERRORS[detail["type"]](message, param=shown or None)


def _expected(detail: ErrorDetails) -> str:
    if detail["type"] in _TYPES:
        return _TYPES[detail["type"]]
    name, phrase = {**_RANGES, **_LENGTHS}.get(detail["type"], ("", "another value"))
    return phrase.format(detail["ctx"][name]) if name else phrase


def _got(detail: ErrorDetails, value: Any) -> str:
    if detail["type"] in _LENGTHS:
        return f"{len(value):,}"
    if isinstance(value, str) and detail["type"] in _RANGES:  # a name, not somebody's text
        return f"'{clip(value)}'"
    return describe(value)


def _real_path(loc: tuple[int | str, ...], value: object) -> Path:
    """The part of pydantic's location that is there in the value: the names of union members aren't."""
    path: list[str | int] = []
    for step in loc:
        in_list = isinstance(step, int) and isinstance(value, list) and step < len(value)
        if in_list or (isinstance(value, Mapping) and step in value):
            value = value[step]  # type: ignore[index]
            path.append(step)
    return tuple(path)


def _at(value: Any, path: Path) -> object:
    for step in path:
        value = value[step]
    return value
