"""Operations on a conversation's cache: from when on messages are no longer attended to, where positions close up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from kvweave.errors import (
    ConflictingFields,
    InvalidDrop,
    InvalidReposition,
    InvalidRequest,
    RequestError,
    UnsupportedParameter,
)
from kvweave.protocol.cache_bodies import CacheBody, CacheFields, ContextEdit, DropRule, Threshold
from kvweave.protocol.limits import Limits
from kvweave.protocol.validation import clip, describe

_DECIMAL = re.compile("0|[1-9][0-9]{0,18}")
_MAX_ID = 2**63 - 1
_ABSENT: tuple[object, ...] = (None, {}, [])
_CLEAR_TOOL_USES = "clear_tool_uses_20250919"


@dataclass(frozen=True)
class ClearToolUses:
    """When to drop old tool results: whenever more than ``trigger`` prompt tokens are active, all but the last ``keep``.

    ``clear_at_least`` tokens must come free by it. The defaults are Anthropic's.
    """

    trigger: int = 100_000
    keep: int = 3
    clear_at_least: int = 0
    exclude_tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edits:
    """``drop`` maps a trigger to the messages that nothing behind it attends to; ``reposition`` names messages after which
    the gaps close. Both by index into the submitted messages.
    """

    drop: Mapping[int, tuple[int, ...]]
    reposition: tuple[int, ...]
    clear_tool_uses: ClearToolUses | None = None

    def __bool__(self) -> bool:
        return any(self.drop.values()) or bool(self.reposition) or self.clear_tool_uses is not None


def parse_edits(body: CacheFields, cache: CacheBody, path: str, messages: int, limits: Limits) -> Edits:
    """All operations of a request with so many ``messages``, in any spelling. ``path`` is where ``cache`` came from.

    Raises ``ConflictingFields``, ``UnsupportedParameter``, ``InvalidDrop``, ``InvalidReposition``.
    """
    own = f"{path}.drop", f"{path}.reposition"
    drops = {own[0]: cache.drop, "drop_message": body.drop_message, "drop_rule": body.drop_rule}
    repositions = {own[1]: cache.reposition, "reposition": body.reposition}
    drops, repositions = ({n: v for n, v in d.items() if v not in _ABSENT} for d in (drops, repositions))
    clearing = _clear_tool_uses(body)
    _refuse_two_spellings([*drops, *repositions], own)
    if clearing is not None and drops:
        raise ConflictingFields(
            f"{next(iter(drops))} and context_management both say what is dropped. Send only one of them.",
            param="context_management",
        )
    if isinstance(rule := drops.pop("drop_rule", None), DropRule) and (listed := _listed(rule)) not in _ABSENT:
        drops["drop_rule.drop_messages"] = listed
    drop = {k: v for n, d in drops.items() for k, v in _drop(d, n, alias=n not in own).items()}
    reposition = tuple(i for n, r in repositions.items() for i in _reposition(r, n, messages, alias=n not in own))
    if sum(map(len, drop.values())) + len(reposition) > limits.edits:
        raise InvalidDrop(f"{own[0]}: more than {limits.edits:,} operations. Drop fewer messages.", param=own[0])
    return Edits(drop, reposition, clearing)


def _refuse_two_spellings(given: list[str], own: tuple[str, ...]) -> None:
    aliases = [name for name in given if name not in own]
    if aliases and (len(aliases) < len(given) or {"drop_message", "drop_rule"} <= set(aliases)):
        first = next(name for name in given if name != aliases[-1])
        raise ConflictingFields(
            f"{first} and {aliases[-1]} are two spellings of one thing. Send only {first}.", param=aliases[-1]
        )


def _listed(rule: DropRule) -> object:
    if rule.type != "message_drop":
        raise UnsupportedParameter(
            f"drop_rule.type '{clip(rule.type)}' is not supported. Use message_drop, or cache.drop.", param="drop_rule.type"
        )
    return rule.drop_messages


def _drop(value: object, path: str, *, alias: bool) -> dict[int, tuple[int, ...]]:
    if not isinstance(value, Mapping):
        raise InvalidDrop(f'{path}: expected an object such as {{"7": [3, 4]}}, got {describe(value)}.', param=path)
    drop: dict[int, tuple[int, ...]] = {}
    for key, ids in value.items():
        place = f"{path}.{clip(key)}"
        if not _DECIMAL.fullmatch(key) or int(key) > _MAX_ID:
            raise InvalidDrop(
                f'{path}["{clip(key)}"]: a trigger is a message index. Write it as plain digits, such as "7".', param=place
            )
        if not isinstance(ids, list):
            raise InvalidDrop(f"{place}: expected a list of message indices, got {describe(ids)}.", param=place)
        trigger = int(key)
        messages = tuple(_message_id(item, f"{place}[{i}]", InvalidDrop, alias=alias) for i, item in enumerate(ids))
        if (late := max(messages, default=0)) > trigger:
            raise InvalidDrop(
                f'{path}["{key}"]: message {late} comes after trigger {trigger}. '
                f"Name messages 0..{trigger}, or use trigger {late} or later.",
                param=place,
            )
        drop[trigger] = messages
    return drop


def _reposition(value: object, path: str, count: int, *, alias: bool) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidReposition(f"{path}: expected a list of message indices, got {describe(value)}.", param=path)
    ids = tuple(_message_id(item, f"{path}[{i}]", InvalidReposition, alias=alias) for i, item in enumerate(value))
    for i, (before, after) in enumerate(pairwise(ids), start=1):
        if after <= before:
            raise InvalidReposition(
                f"{path}: {after} follows {before}. Name each message once, in ascending order.", param=f"{path}[{i}]"
            )
    if ids and ids[-1] >= count:
        raise InvalidReposition(
            f"{path}: message {ids[-1]} does not exist. Name messages 0..{count - 1}.", param=f"{path}[{len(ids) - 1}]"
        )
    return ids


def _message_id(value: object, path: str, error: type[RequestError], *, alias: bool) -> int:
    """A message index. Under the names of AKV's released code it may be ``"1"`` or ``1.0`` too."""
    if alias and isinstance(value, float) and value.is_integer():
        value = int(value)
    if alias and isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_ID:
        raise error(f"{path}: expected a message index from 0 on, got {describe(value)}. Send an integer.", param=path)
    return value


def _clear_tool_uses(body: CacheFields) -> ClearToolUses | None:
    edits = (body.context_management.edits if body.context_management else None) or []
    for i, edit in enumerate(edits):
        path = f"context_management.edits[{i}]"
        if edit.type != _CLEAR_TOOL_USES:
            raise UnsupportedParameter(
                f"{path}.type '{clip(edit.type)}' is not supported. Use {_CLEAR_TOOL_USES}, or cache.drop.",
                param=f"{path}.type",
            )
        if edit.clear_tool_inputs:
            raise UnsupportedParameter(
                f"{path}.clear_tool_inputs is not supported. Leave it out, or name messages in cache.drop.",
                param=f"{path}.clear_tool_inputs",
            )
    if len(edits) > 1:
        raise ConflictingFields(
            "context_management.edits: two rules of one type. Send only one.", param="context_management.edits[1]"
        )
    return _rule(edits[0]) if edits else None


def _rule(edit: ContextEdit) -> ClearToolUses:
    path = "context_management.edits[0]"

    def value(name: str, unit: str, default: int) -> int:
        threshold: Threshold | None = getattr(edit, name)
        if threshold is None:
            return default
        if threshold.type != unit:
            raise InvalidRequest(f"{path}.{name}.type: expected {unit}. Send that.", param=f"{path}.{name}.type")
        return threshold.value

    default = ClearToolUses()
    return ClearToolUses(
        trigger=value("trigger", "input_tokens", default.trigger),
        keep=value("keep", "tool_uses", default.keep),
        clear_at_least=value("clear_at_least", "input_tokens", default.clear_at_least),
        exclude_tools=tuple(edit.exclude_tools or ()),
    )
