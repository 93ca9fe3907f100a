"""Remote tiers from one URL.

::

    redis://[user:password@]host[:port][/db]?ttl=7d&timeout=250ms&connections=8&compression=zstd
    rediss://...                               the same over TLS; ca_file=... for a private authority; also valkey(s)://
    s3://bucket[/prefix]?region=...&endpoint=https://...&timeout=2s&compression=zstd
        also: access_key_id, secret_access_key, session_token (else AWS's usual variables), allow_http, skip_signature,
        virtual_hosted

Durations are a number and ms, s, m, h or d. URLs may hold secrets, so only ``redacted`` ones are ever shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvweave.errors import InvalidOption, StoreError, UnknownOption, suggest
from kvweave.store.base import TierError
from kvweave.store.compress import Compressed
from kvweave.store.guard import Guarded
from kvweave.store.redis_blobs import RedisBlobs
from kvweave.store.s3_blobs import S3Blobs

_REDIS = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss"}
_SCHEMES = (*_REDIS, "s3")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FLAGS = ("allow_http", "skip_signature", "virtual_hosted")
_PUBLIC = frozenset({"ttl", "timeout", "compression", "connections", "region", *_FLAGS})
"""Options whose values are shown; all others may hold a secret, if only by mistake."""
_SECRET = frozenset({"ca_file", "endpoint", "access_key_id", "secret_access_key", "session_token"})


def open_remote(url: str, *, check: bool = True) -> Guarded:
    """The remote tier of ``url``. Raises ``ConfigError``; with ``check`` also ``StoreError`` if it doesn't answer."""
    parts = _split(url)
    options = _Options(parts, url)
    compression = options.take("compression", _one_of("none", "zstd"), "none")
    if parts.scheme == "s3":
        timeout = options.take("timeout", _duration, 2.0)
        make: Callable[[], Any] = _s3(parts, options, timeout)
    else:
        timeout = options.take("timeout", _duration, 0.25)
        make = _redis(parts, options, timeout)
    options.finish()
    medium = make()
    guarded = Guarded(Compressed(medium) if compression == "zstd" else medium, patience=timeout)
    if check:
        try:
            check_remote(medium, url, timeout)
        except BaseException:
            guarded.close()
            raise
    return guarded


def check_remote(medium: RedisBlobs | S3Blobs, url: str, timeout: float) -> None:
    """Raises ``StoreError`` if the medium doesn't answer within about ``timeout`` [s]."""
    try:
        medium.ping(time.monotonic() + 2 * timeout)
    except TierError as error:
        raise StoreError(
            f"The remote tier {redacted(url)} can't be used ({error}). "
            "Check that the server runs, its address and the credentials, or take the tier out of the configuration."
        ) from None


def address(url: str) -> str:
    """Where a remote tier's values lie, however its URL says so and whatever else it says. Raises ``ConfigError``."""
    parts = _split(url)
    if parts.scheme in _REDIS:
        return f"redis {parts.hostname}:{parts.port or 6379}/{parts.path[1:] or 0}"
    endpoint = dict(parse_qsl(parts.query)).get("endpoint", "")
    return f"{parts.scheme} {endpoint.rstrip('/')} {parts.hostname}/{parts.path.strip('/')}"


def redacted(url: str) -> str:
    """``url`` without anything that may be secret; never raises, whatever it is given."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***"
    # Up to the last @: unescaped passwords may hold any character.
    _, at, rest = rest.rpartition("@")
    place, question, query = rest.partition("?")
    shown = []
    for pair in query.split("&") if query else []:
        name, _, value = pair.partition("=")
        shown.append(f"{name}={value}" if name in _PUBLIC else f"{name if name in _SECRET else '***'}=***")
    return f"{scheme}://{'***' if at else ''}{at}{place}{question}{'&'.join(shown)}"


def _redis(parts: SplitResult, options: _Options, timeout: float) -> Callable[[], RedisBlobs]:
    if not re.fullmatch(r"(/\d*)?", parts.path):
        raise InvalidOption(f"The path of {options.url} must be the number of a database, as in redis://host:6379/0.")
    arguments: dict[str, Any] = {
        "ttl": options.take("ttl", _duration, 7 * 86400.0),
        "connections": options.take("connections", _count, 8),
        "db": int(parts.path[1:] or 0),
    }
    scheme = _REDIS[parts.scheme]
    if scheme == "rediss" and (ca_file := options.take("ca_file", str, "")):
        arguments["ssl_ca_certs"] = ca_file
    for name in ("username", "password"):
        if value := getattr(parts, name):
            arguments[name] = unquote(value)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    plain = f"{scheme}://{host}:{parts.port or 6379}"
    return lambda: RedisBlobs(plain, timeout=timeout, **arguments)


def _s3(parts: SplitResult, options: _Options, timeout: float) -> Callable[[], S3Blobs]:
    if parts.username is not None or parts.port is not None:
        raise InvalidOption(
            f"{options.url} must be s3://bucket/prefix; give the server as endpoint=... and keys as access_key_id=..."
        )
    config: dict[str, Any] = {"allow_http": options.take("allow_http", _flag, False)}
    for name, read in (
        ("endpoint", _endpoint),
        ("region", str),
        ("access_key_id", str),
        ("secret_access_key", str),
        ("session_token", str),
        ("skip_signature", _flag),
    ):
        if (value := options.take(name, read, None)) is not None:
            config[name] = value
    config["virtual_hosted_style_request"] = options.take("virtual_hosted", _flag, False)
    if str(config.get("endpoint", "")).startswith("http:") and not config["allow_http"]:
        raise InvalidOption(f"The endpoint of {options.url} isn't https. Add allow_http=true if that is meant.")
    bucket, prefix = parts.netloc, unquote(parts.path)
    return lambda: S3Blobs(bucket, prefix, timeout=timeout, **config)


class _Options:
    """The query of a URL, taken one by one; what is left over is unknown."""

    def __init__(self, parts: SplitResult, url: str) -> None:
        self.url = redacted(url)
        self._where = f"{parts.scheme}:// URLs"
        pairs = parse_qsl(parts.query, keep_blank_values=True)
        self._values = dict(pairs)
        self._known: list[str] = []
        if len(pairs) != len(self._values):
            raise InvalidOption(f"{self.url} gives an option twice. Remove one of them.")

    def take(self, name: str, read: Callable[[str], Any], default: Any) -> Any:
        self._known.append(name)
        if name not in self._values:
            return default
        text = self._values.pop(name)
        try:
            return read(text)
        except ValueError as error:
            shown = f"={text}" if name in _PUBLIC else ""
            raise InvalidOption(f"{name}{shown} in {self.url} is no good: {error}") from None

    def finish(self) -> None:
        for name in self._values:
            raise UnknownOption(name, self._known, self._where)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # The reason would quote a part of the URL, which may be a password with characters that must be escaped.
        raise InvalidOption(f"{redacted(url)} is no URL. Write special characters of a password as %XX.") from None
    if parts.scheme not in _SCHEMES:
        raise InvalidOption(f"{redacted(url)} is no remote tier. {suggest(parts.scheme, _SCHEMES)}")
    if parts.fragment or not parts.hostname:
        raise InvalidOption(f"{redacted(url)} names no host or bucket, or holds a '#', which must be written as %23.")
    return parts


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if match is None or (seconds := float(match[1]) * _UNITS[match[2]]) <= 0 or seconds > 366 * 86400:
        raise ValueError("give a number above 0 and ms, s, m, h or d, as in 250ms, at most a year")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError("give a whole number from 1 to 1024")
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("give true or false")
    return text == "true"


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ValueError("give http(s)://host:port, without a user or password")
    return text.rstrip("/")


def _one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(suggest(text, names))
        return text

    return read
