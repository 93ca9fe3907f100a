"""Cache options of a request: one value, whichever of their many spellings a client or gateway used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvweave.client import count_ops
from kvweave.core.prompt import Document
from kvweave.errors import ConflictingFields, InvalidRequest, UnsupportedParameter
from kvweave.protocol import later
from kvweave.protocol.cache_bodies import CacheBody, CacheFields
from kvweave.protocol.edits import ClearToolUses, parse_edits
from kvweave.protocol.limits import Limits
from kvweave.protocol.validation import validate

HEADER = "X-KV-Cache"
DEFAULT_PIN = 300.0
"""Seconds a breakpoint without ttl asks for: Anthropic's default."""
_RETENTION = 86400.0  # seconds of prompt_cache_retention "24h"
_OWN_FIELDS = (
    *("cache", "kv_cache", "documents", "drop_message", "drop_rule", "reposition", "context_management", "cache_salt"),
    *("segments", "prompt_cache_retention", "prompt_cache_options", "cache_control"),
)


@dataclass(frozen=True)
class Pin:
    """A minimum life, refreshed on use: of a document, or of the prefix up to the end of a part of a message.

    ``seconds`` long. A ``strict`` one that doesn't fit the tenant's quota is an error, others are given up. Without
    ``message`` it is the whole prompt; without ``part``, a message whose content is one string.
    """

    seconds: float
    strict: bool
    document: Document | None = None
    message: int | None = None
    part: int | None = None


@dataclass(frozen=True)
class CacheOptions:
    """What to reuse, how, and for how long. None: the server's default.

    ``ttl`` is in seconds, ``max_divergence`` in nats. ``drop``, ``reposition`` and ``clear_tool_uses`` are operations on the
    conversation. ``salt`` narrows the tenant's namespace. ``affinity`` is a hint for routers, without effect on results.
    ``given`` is True if the client said anything about caching.
    """

    reuse: str | None = None
    technique: str | None = None
    recompute_ratio: float | None = None
    max_divergence: float | None = None
    fallback: str = "allow"
    ttl: float | None = None
    store: str = "all"
    explain: bool = False
    timings: bool = False
    template: str | None = None
    max_restore_tokens: int | None = None
    drop: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    reposition: tuple[int, ...] = ()
    clear_tool_uses: ClearToolUses | None = None
    salt: str = ""
    affinity: str | None = None
    pins: tuple[Pin, ...] = ()
    given: bool = False


@dataclass(frozen=True)
class Received:
    """What arrived: the checked body, the ``cache`` object in force, where it stood, and how many operations there are."""

    body: CacheFields
    cache: CacheBody
    path: str
    operations: int
    affinity: str | None


def receive(body: CacheFields, raw: Mapping[str, object], headers: Mapping[str, str], limits: Limits) -> Received:
    """Bring the places together in which a request may speak about caching. ``raw`` is the body as it came.

    Raises ``ConflictingFields``, ``UnsupportedParameter``, ``UnknownCacheField``, ``InvalidRequest``.
    """
    _refuse_wrappers(raw)
    lower = {name.lower(): value for name, value in headers.items()}
    given: dict[str, tuple[CacheBody, object]] = {}
    for path in ("cache", "kv_cache"):
        if (value := getattr(body, path)) is not None:
            given[path] = value, raw[path]
    if HEADER.lower() in lower:
        sent = _from_header(lower[HEADER.lower()], limits)
        given[HEADER] = validate(CacheBody, sent, HEADER), sent
    if len(given) > 1:
        first, second, *_ = given
        raise ConflictingFields(f"{first} and {second} are two spellings of one thing. Send only {first}.", param=second)
    path, (cache, sent) = next(iter(given.items()), ("cache", (CacheBody(), None)))
    operations = count_ops({**raw, "kv_cache": None, "cache": sent, "extra_body": None})
    affinity = body.prompt_cache_key or body.session_id or lower.get("x-session-id") or None
    return Received(body, cache, path, operations, affinity)


def cache_options(received: Received, pins: tuple[Pin, ...], messages: int, limits: Limits) -> CacheOptions:
    """The options of a request with so many ``messages``, whose marks ask for ``pins``. Raises ``RequestError``s."""
    body, cache, path = received.body, received.cache, received.path
    edits = parse_edits(body, cache, path, messages, limits)
    later.refuse_edits(edits, path)
    later.refuse_template(cache.template, path)
    ttl, store = _retention(body, cache, path)
    if ttl is not None:
        check_span(ttl, f"{path}.ttl", limits)
    pins += _whole_prompt_pins(body, limits)
    for pin in pins:
        if pin.strict and ttl is not None and pin.seconds > ttl:
            raise ConflictingFields(
                f"A pin of {pin.seconds:g} s lasts longer than the ttl of {ttl:g} s. Shorten it.", param=f"{path}.ttl"
            )
    return CacheOptions(
        reuse=cache.reuse,
        technique=cache.technique,
        recompute_ratio=cache.recompute_ratio,
        max_divergence=cache.max_divergence,
        fallback=cache.fallback or "allow",
        ttl=ttl,
        store=store or "all",
        explain=bool(cache.explain),
        timings=bool(cache.timings or cache.explain),
        template=cache.template,
        max_restore_tokens=cache.max_restore_tokens,
        drop=edits.drop,
        reposition=edits.reposition,
        clear_tool_uses=edits.clear_tool_uses,
        salt=body.cache_salt or "",
        affinity=received.affinity,
        pins=pins,
        given=received.operations > 0,
    )


def check_span(seconds: float, path: str, limits: Limits) -> float:
    """``seconds``, if that's a life a record may have. Raises ``InvalidRequest``."""
    if not limits.min_ttl <= seconds <= limits.max_ttl:
        raise InvalidRequest(
            f"{path}: {seconds:,.10g} s is out of range. Use {limits.min_ttl:g} s to {limits.max_ttl / 86400:g} days.",
            param=path,
        )
    return seconds


def _refuse_wrappers(raw: Mapping[str, object]) -> None:
    """Operations in places where they would be lost without a word."""
    wrapper, metadata = raw.get("extra_body"), raw.get("metadata")
    for name in _OWN_FIELDS:
        if isinstance(wrapper, Mapping) and name in wrapper:
            raise ConflictingFields(
                f"extra_body is a wrapper of clients: it arrived as it is, with {name} in it. Send {name} at the top level.",
                param=f"extra_body.{name}",
            )
    if isinstance(metadata, Mapping) and metadata.get("kv_cache") is not None:
        raise UnsupportedParameter(
            f"metadata.kv_cache is not supported. Send kv_cache, or the header {HEADER}.", param="metadata.kv_cache"
        )


def _from_header(text: str, limits: Limits) -> object:
    if len(text) > limits.header_bytes:
        raise InvalidRequest(
            f"{HEADER}: {len(text):,} bytes, the limit is {limits.header_bytes:,}. Send the body field kv_cache.",
            param=HEADER,
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{HEADER}: not JSON. Send the object that cache would hold.", param=HEADER) from error


def _retention(body: CacheFields, cache: CacheBody, path: str) -> tuple[float | None, str | None]:
    """Maximum life in seconds and where records may go, OpenAI's field included."""
    retention = body.prompt_cache_retention
    name, own = ("ttl", cache.ttl) if retention == "24h" else ("store", cache.store)
    if retention is not None and own is not None:
        raise ConflictingFields(
            f"prompt_cache_retention and {path}.{name} are two spellings of one thing. Send only {path}.{name}.",
            param="prompt_cache_retention",
        )
    if retention == "24h":
        return _RETENTION, cache.store
    return cache.ttl, "memory" if retention else cache.store


def _whole_prompt_pins(body: CacheFields, limits: Limits) -> tuple[Pin, ...]:
    options, control = body.prompt_cache_options, body.cache_control
    if options is not None and options.prewarm:
        raise UnsupportedParameter(
            "prompt_cache_options.prewarm is not supported. Send the body to /v1/cache/warm.",
            param="prompt_cache_options.prewarm",
        )
    pins = []
    if options is not None and options.ttl is not None:
        pins.append(Pin(check_span(options.ttl, "prompt_cache_options.ttl", limits), strict=False))
    if control is not None:
        life = DEFAULT_PIN if control.ttl is None else control.ttl
        pins.append(Pin(check_span(life, "cache_control.ttl", limits), strict=False))
    return tuple(pins)
