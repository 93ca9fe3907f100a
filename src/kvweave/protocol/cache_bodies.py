"""What a body may say about caching: the ``cache`` object, marks, and the fields of others that mean the same."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from kvweave.errors import InvalidRequest, UnknownCacheField
from kvweave.protocol.validation import refuse

_DURATION = re.compile(r"([0-9]{1,12})(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_GATEWAY_KEYS = ("no-cache", "no-store", "s-maxage", "namespace", "use-cache")
LABEL = r"^[A-Za-z0-9._:@-]{1,128}$"


def seconds(value: object) -> float:
    """Of a duration: whole seconds, or ``500ms 30s 5m 1h 7d``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(min(value, 10**12))  # far out of range in any case
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        return int(match[1]) * _SECONDS[match[2]]
    raise refuse(
        InvalidRequest, "{path}: expected a duration. Send whole seconds, or a text such as 500ms, 30s, 5m, 1h or 7d."
    )


_DURATION_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{_DURATION.pattern}$"}]}
Duration = Annotated[float, BeforeValidator(seconds), WithJsonSchema(_DURATION_SCHEMA)]
"""A float in seconds, once validated."""

# Checked by ``edits``, which has error codes of its own. Empty values of either type equal absence.
_EMPTY = [{"type": "array", "maxItems": 0}, {"type": "object", "maxProperties": 0}, {"type": "null"}]
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_DROP_SCHEMA = {"anyOf": [{"type": "object", "additionalProperties": _IDS}, *_EMPTY]}
_REPOSITION_SCHEMA = {"anyOf": [_IDS, *_EMPTY]}


class Closed(BaseModel):
    """An object in which an unknown key is an error: it may be an operation with a typing error in it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key not in cls.model_fields:
                raise refuse(UnknownCacheField, _unknown(key, list(cls.model_fields)), key)
        return value


def _unknown(key: str, known: list[str]) -> str:
    if key in _GATEWAY_KEYS:
        return (
            "{path} belongs to the response cache of a gateway, which answers to the same name. "
            "Send our options as kv_cache, or in the header X-KV-Cache."
        )
    close = get_close_matches(key, known, n=1)
    hint = f"Did you mean {{parent}}.{close[0]}?" if close else f"Known: {', '.join(sorted(known))}."
    return f"{{path}} is not a field of {{parent}}. {hint}"


class Mark(Closed):
    """On a content part or a document: its text is a segment, reused and reported on its own."""

    segment: str | None = Field(default=None, pattern=LABEL)
    kind: Literal["document", "text", "fixed", "updated"] = "document"
    pin: Duration | None = None


class CacheBody(Closed):
    """What to reuse, how, and for how long. Every field may be null, which is as if it weren't there."""

    drop: Annotated[Any, WithJsonSchema(_DROP_SCHEMA)] = None
    reposition: Annotated[Any, WithJsonSchema(_REPOSITION_SCHEMA)] = None
    reuse: Literal["exact", "fused", "auto", "off"] | None = None
    technique: str | None = Field(default=None, min_length=1, max_length=256)
    template: str | None = Field(default=None, pattern=LABEL)
    recompute_ratio: float | None = Field(default=None, ge=0, le=1)
    max_divergence: float | None = Field(default=None, ge=0)
    fallback: Literal["allow", "refuse"] | None = None
    ttl: Duration | None = None
    store: Literal["all", "memory", "none"] | None = None
    explain: bool | None = None
    timings: bool | None = None
    max_restore_tokens: int | None = Field(default=None, ge=0)


class CacheControl(Closed):
    """Anthropic's breakpoint: the prefix up to here is worth keeping."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Duration | None = None


class CacheBreakpoint(Closed):
    """OpenAI's breakpoint: the prefix up to here is worth keeping for at least ``ttl``."""

    ttl: Duration | None = None
    mode: str | None = None


class PromptCacheOptions(Closed):
    """OpenAI's: the whole prompt is worth keeping for at least ``ttl``. ``mode`` doesn't change an answer."""

    ttl: Duration | None = None
    mode: str | None = None
    comparison_response_id: str | None = None
    prewarm: bool | None = None


class DropRule(Closed):
    """Of AKV's released code; ``message_drop`` is ``cache.drop``."""

    type: str
    drop_messages: Any = None


class Threshold(Closed):
    """A number of input tokens or of tool uses."""

    type: Literal["input_tokens", "tool_uses"]
    value: int = Field(ge=0)


class ContextEdit(Closed):
    """Anthropic's rule for dropping old tool results (``clear_tool_uses_20250919``)."""

    type: str
    trigger: Threshold | None = None
    keep: Threshold | None = None
    clear_at_least: Threshold | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | None = None


class ContextManagement(Closed):
    edits: list[ContextEdit] | None = None


class CacheFields(BaseModel):
    """Top-level fields about caching, ours and those of others."""

    cache: CacheBody | None = None
    kv_cache: CacheBody | None = Field(default=None, description="Another name of cache, for gateways that use that one.")
    cache_salt: str | None = Field(default=None, max_length=128)
    prompt_cache_key: str | None = None
    session_id: str | None = None
    cache_control: CacheControl | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["24h", "in_memory", "in-memory"] | None = None
    drop_message: Any = None
    drop_rule: DropRule | None = None
    reposition: Any = None
    context_management: ContextManagement | None = None
