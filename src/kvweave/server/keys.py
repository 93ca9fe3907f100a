"""API keys: who may ask, for which tenant, and how much at a time."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from kvweave.errors import ConfigError, InvalidApiKey, MissingApiKey, RateLimited, ScopeMissing, suggest

Scope = Literal["infer", "cache", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
_FIELDS = ("name", "sha256", "tenant", "scopes", "limits")
_LIMITS = ("max_concurrent",)
_BUSY = 2.0  # seconds after which a key that runs too much may have room again


@dataclass(frozen=True)
class Caller:
    """Who asks. ``max_concurrent``: requests at a time; None: no limit."""

    name: str
    tenant: str
    scopes: frozenset[Scope]
    max_concurrent: int | None = None

    def require(self, scope: Scope) -> None:
        """Raises ``ScopeMissing``."""
        if scope not in self.scopes:
            own = ", ".join(sorted(self.scopes)) or "none"
            raise ScopeMissing(f"This key has scope {own}; this needs '{scope}'. Use a key with that scope.")


class KeyRing:
    """The keys of a server. Without any, everybody is ``anonymous``.

    Keys are known by their SHA-256 alone. Thread-safe.
    """

    def __init__(self, keys: Mapping[bytes, Caller], anonymous: Caller | None = None) -> None:
        self._keys = dict(keys)
        self._anonymous = anonymous
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """True if no key is needed."""
        return self._anonymous is not None

    def replace(self, keys: Mapping[bytes, Caller]) -> None:
        """From now on these are the keys; what runs goes on."""
        self._keys = dict(keys)

    def identify(self, authorization: str | None) -> Caller:
        """Who sent this ``Authorization`` header. Raises ``MissingApiKey``, ``InvalidApiKey``."""
        if self._anonymous is not None:
            return self._anonymous
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise MissingApiKey('No API key. Send "Authorization: Bearer <key>"; keys are set with --api-key-file.')
        digest = digest_of(key.strip())
        found = [caller for known, caller in self._keys.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise InvalidApiKey("This API key isn't known here. Check it, or ask the operator for one.")
        return found[0]

    @contextmanager
    def running(self, caller: Caller) -> Iterator[None]:
        """One request of a key. Raises ``RateLimited`` if it runs as many as it may."""
        with self._lock:
            if caller.max_concurrent is not None and self._running[caller.name] >= caller.max_concurrent:
                raise RateLimited(
                    f"Key '{caller.name}' may run {caller.max_concurrent} requests at a time. Retry after {_BUSY:g} s.",
                    retry_after=_BUSY,
                )
            self._running[caller.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[caller.name] -= 1


def digest_of(key: str) -> bytes:
    """SHA-256 of a key, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> dict[bytes, Caller]:
    """The keys of a YAML file: a list of ``name``, ``sha256``, ``tenant``, ``scopes`` and ``limits``.

    Raises ``ConfigError`` that names the entry.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"The key file '{path}' can't be read: {reason}. Correct it.") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"The key file '{path}' has no keys. Write a list of entries with {', '.join(_FIELDS)}.")
    keys: dict[bytes, Caller] = {}
    for i, entry in enumerate(entries):
        digest, caller = _parse(entry, f"{path}: entry {i + 1}")
        if digest in keys or caller.name in {other.name for other in keys.values()}:
            raise ConfigError(f"{path}: entry {i + 1}: name or key is there twice. Give each key an entry of its own.")
        keys[digest] = caller
    return keys


def _parse(entry: Any, where: str) -> tuple[bytes, Caller]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected a mapping with {', '.join(_FIELDS)}.")
    _known(entry, _FIELDS, where)
    name, text, tenant = (entry.get(field) for field in ("name", "sha256", "tenant"))
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: 'name' is missing. Name the key, for the log.")
    if not isinstance(tenant, str) or not tenant:
        raise ConfigError(f"{where}: 'tenant' is missing. Say whose KV this key may find.")
    try:
        digest = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ConfigError(f"{where}: 'sha256' must be 64 hexadecimal digits: printf %s KEY | sha256sum")
    limits = entry.get("limits") or {}
    if not isinstance(limits, dict):
        raise ConfigError(f"{where}: 'limits' must be a mapping with {', '.join(_LIMITS)}.")
    _known(limits, _LIMITS, f"{where}: limits")
    most = limits.get("max_concurrent")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ConfigError(f"{where}: limits.max_concurrent must be 1 or more.")
    return digest, Caller(name, tenant, frozenset(_scopes(entry.get("scopes"), where)), most)


def _scopes(value: Any, where: str) -> Sequence[Scope]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: 'scopes' must be a list of {', '.join(SCOPES)}.")
    for scope in value:
        if scope not in SCOPES:
            raise ConfigError(f"{where}: scope '{scope}' is unknown. {suggest(str(scope), SCOPES)}")
    return value


def _known(mapping: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for name in mapping:
        if name not in known:
            raise ConfigError(f"{where}: '{name}' is unknown. {suggest(str(name), known)}")
