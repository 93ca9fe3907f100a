"""Unknown fields of a body: ignored, but named to the caller."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from kvweave.errors import InvalidRequest
from kvweave.protocol.bodies import GenerationFields
from kvweave.protocol.validation import clip

MAX_NAMED = 32
"""More names than that help nobody, and may not fit into a header."""
_NOTHING: tuple[object, ...] = (None, [], {}, "")


def ignored_fields(body: GenerationFields, nested: Iterable[tuple[str, BaseModel]], strict: bool) -> tuple[str, ...]:
    """Names of fields of ``body`` and of the objects in it (``nested``, each with its place) that have no effect.

    Null and empty values equal absence. With ``strict`` the first such field is an ``InvalidRequest``.
    """
    names: dict[str, None] = {}
    for where, part in (("", body), *nested, ("stream_options.", body.stream_options)):
        for name, value in (part.model_extra or {}).items() if part is not None else ():
            if value not in _NOTHING and len(names) < MAX_NAMED:
                names[where + clip(name)] = None
    if strict and names:
        shown, first = ", ".join(names), next(iter(names))
        raise InvalidRequest(f"Unknown fields: {shown}. Leave them out: the server is strict about fields.", param=first)
    if (options := body.prompt_cache_options) is not None:  # known, but without effect on an answer
        without_effect = {"mode": options.mode, "comparison_response_id": options.comparison_response_id}
        names |= {f"prompt_cache_options.{name}": None for name, value in without_effect.items() if value}
    return tuple(names)
