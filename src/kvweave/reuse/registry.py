"""Techniques by name. Other packages add theirs through the entry point group ``kvweave.techniques``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import typing
from typing import Any

from kvweave.errors import ConfigError, InvalidOption, UnknownOption, UnknownTechnique
from kvweave.reuse.base import Technique
from kvweave.reuse.cacheblend import CacheBlend
from kvweave.reuse.epic import Epic
from kvweave.reuse.full import Full
from kvweave.reuse.naive import Naive, Raw
from kvweave.reuse.prefix import Prefix
from kvweave.reuse.question import Question
from kvweave.reuse.random_rows import Random

ENTRY_POINTS = "kvweave.techniques"
DEFAULT_TECHNIQUE = "question"
_BUILT_IN: dict[str, type[Any]] = {cls.name: cls for cls in (Full, Prefix, Naive, Raw, Epic, Random, CacheBlend, Question)}


def techniques() -> dict[str, type[Any]]:
    """All techniques by name: the built-in ones and those of installed packages."""
    return {name: _load(name) for name in technique_names()}


def technique_names() -> list[str]:
    """Names of all techniques; loads no plugin."""
    installed = [e.name for e in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    return [*_BUILT_IN, *(name for name in installed if name not in _BUILT_IN)]


def _load(name: str) -> type[Any]:
    """The class of a technique; a plugin that can't be used is a ``ConfigError`` that names its package."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    (entry,) = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    try:
        cls = entry.load()
    except Exception as error:  # whatever importing somebody's module raises
        raise ConfigError(f"Technique '{name}' ({entry.value}) can't be imported: {error}. Fix or remove it.") from error
    if not dataclasses.is_dataclass(cls) or not callable(getattr(cls, "plan", None)) or getattr(cls, "name", "") != name:
        raise ConfigError(f"Technique '{name}' ({entry.value}) must be a dataclass with a plan method and name = '{name}'.")
    return cls  # type: ignore[return-value]


def make_technique(spec: str | Technique, *, ratio: float | None = None, **options: Any) -> Technique:
    """A technique from its name, or from ``name:option=value,option=value``; an instance is returned as it is.

    ``ratio`` is the recompute ratio, for techniques that have one. Raises ``UnknownTechnique``, ``UnknownOption``,
    ``InvalidOption``.
    """
    if not isinstance(spec, str):
        if ratio is not None or options:
            raise InvalidOption("Give options either in the technique object or by name, not both.")
        return spec
    name, _, text = spec.partition(":")
    if name not in (known := technique_names()):
        raise UnknownTechnique(name, known)
    cls = _load(name)
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise InvalidOption(f"'{item}' in technique '{spec}' has no value. Write name:option=value.")
        options[key.strip()] = _parse(cls, key.strip(), value.strip())
    if ratio is not None:
        options["ratio"] = ratio
    fields = [f.name for f in dataclasses.fields(cls)]
    for key in options:
        if key not in fields:
            raise UnknownOption(key, fields or ["(none)"], f"technique '{name}'")
    return cls(**options)


def with_ratio(technique: Technique, ratio: float) -> Technique:
    """The same technique, all its other options kept, at another recompute ratio."""
    fields = [f.name for f in dataclasses.fields(technique)]  # type: ignore[arg-type]
    if "ratio" not in fields:
        raise UnknownOption("ratio", fields or ["(none)"], f"technique '{technique.name}'")
    return dataclasses.replace(technique, ratio=ratio)  # type: ignore[type-var]


def _parse(cls: type[Any], key: str, value: str) -> Any:
    """Convert text to the type of the option it is for."""
    hints = typing.get_type_hints(cls)
    if key not in hints:
        raise UnknownOption(key, [f.name for f in dataclasses.fields(cls)] or ["(none)"], f"technique '{cls.name}'")
    if hints[key] is bool:
        if value not in ("true", "false"):
            raise InvalidOption(f"{key}={value!r} is not a switch. Write {key}=true or {key}=false.")
        return value == "true"
    kinds = [t for t in (typing.get_args(hints[key]) or (hints[key],)) if t in (int, float)]
    try:
        return kinds[0](value) if kinds else value
    except ValueError:
        raise InvalidOption(f"{key}={value!r} is not a number. Give {key} a value like {key}=4.") from None
