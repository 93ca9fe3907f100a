"""Settings of ``kvweave serve``: one name for a flag, an environment variable and a key of a YAML file.

``--disk-tier`` is ``KVWEAVE_DISK_TIER`` is ``disk_tier``; a flag beats the environment, which beats the file, which beats
the default.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvweave.config import EngineConfig, Tiers, parse_size
from kvweave.errors import ConfigError, InvalidOption, UnknownOption, suggest

PREFIX = "KVWEAVE_"
HOME = "KVWEAVE_HOME"
CONFIG = "KVWEAVE_CONFIG"
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SECRET = {"secret": True}

Origin = Literal["flag", "environment", "file", "default"]


@dataclass(frozen=True)
class ServerSettings:
    """Sizes are texts such as ``4GiB``, times seconds or texts such as ``30s``. Raises ``InvalidOption``."""

    model: str = "demo"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, metadata=_SECRET)
    api_key_file: Path | None = None
    insecure: bool = False
    """Serve other machines although there is no key."""
    served_model_name: str | None = None
    max_model_len: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: str = "auto"
    max_num_seqs: int = 256
    chat_template: Path | None = None
    content_format: Literal["auto", "string", "parts"] = "auto"
    tool_parser: str = "auto"
    kv_pool: str = "auto"
    host_tier: str = "10%"
    """Of the machine's memory, or a size."""
    disk_tier: str | None = None
    remote_tier: tuple[str, ...] = field(default=(), metadata=_SECRET)
    """URLs, which may hold passwords."""
    codec: str = "raw"
    secret_file: Path | None = None
    reuse: Literal["exact", "fused", "auto", "off"] = "exact"
    """What a request gets that doesn't say."""
    no_fused: bool = False
    technique: str | None = None
    recompute_ratio: float | None = None
    max_divergence: float = 0.05
    """Nats."""
    gate: Literal["auto", "force"] = "auto"
    max_queue: int = 256
    max_body: str = "16MiB"
    request_log: Path | None = None
    """None: in memory."""
    strict_fields: bool = False
    sse_keepalive: str = "0"
    """Between comments in a stream that says nothing; 0: none."""
    drain_timeout: str = "30s"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        ranges = (
            ("port", 0 <= self.port <= 65535, "0 (any free one) to 65535"),
            ("max_queue", self.max_queue >= 1, "1 or more"),
            ("max_num_seqs", self.max_num_seqs >= 1, "1 or more"),
            ("max_divergence", self.max_divergence >= 0, "0 or more"),
            ("recompute_ratio", self.recompute_ratio is None or 0 <= self.recompute_ratio <= 1, "0 to 1"),
        )
        for name, ok, expected in ranges:
            if not ok:
                raise InvalidOption(f"{name}={getattr(self, name)} is out of range. Use {expected}.")
        if self.api_key is not None and self.api_key_file is not None:
            raise InvalidOption("api_key and api_key_file are both set. Put all keys into the file.")
        for name in ("sse_keepalive", "drain_timeout"):
            parse_seconds(getattr(self, name), name)
        if not self.loopback and not self.has_keys and not self.insecure:
            raise InvalidOption(
                f"Without an API key only this machine is served, but host is {self.host}. "
                "Set --api-key-file (or KVWEAVE_API_KEY), use --host 127.0.0.1, or allow it with --insecure."
            )

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the server."""
        return self.host in _LOOPBACK

    @property
    def has_keys(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body, "max_body")

    @property
    def keepalive(self) -> float:
        """Seconds; 0: off."""
        return parse_seconds(self.sse_keepalive, "sse_keepalive")

    @property
    def drain_seconds(self) -> float:
        return parse_seconds(self.drain_timeout, "drain_timeout")

    def engine_options(self, home: Path | None, memory: int) -> dict[str, Any]:
        """Fields of ``EngineConfig``, checked. ``memory``: bytes of this machine, of which ``host_tier`` may be a share."""
        tiers = Tiers(disk=self.disk_tier, remote=self.remote_tier, codec=self.codec, secret_file=self.secret_file)
        options = {
            "device": self.device,
            "dtype": self.dtype,
            "threads": int(self.threads) if self.threads.isdecimal() else self.threads,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "kv_pool": self.kv_pool,
            "chunk_cache": _share(self.host_tier, memory),
            "tiers": tiers,
            "chat_template": self.chat_template,
            "content_format": self.content_format,
            "home": home,
        }
        EngineConfig.of(**options)
        return options


FIELDS = {f.name: f for f in dataclasses.fields(ServerSettings)}
_HINTS = typing.get_type_hints(ServerSettings)


@dataclass(frozen=True)
class Resolved:
    """Settings, and where each of them comes from."""

    settings: ServerSettings
    origins: Mapping[str, Origin]

    def rows(self) -> list[tuple[str, str, Origin]]:
        """Name, value and origin of all settings, secrets hidden."""
        return [(name, self._shown(name), self.origins[name]) for name in FIELDS]

    def _shown(self, name: str) -> str:
        value = getattr(self.settings, name)
        if value in (None, ()):
            return "-"
        if FIELDS[name].metadata.get("secret"):
            return " ".join(map(_without_password, value)) if isinstance(value, tuple) else "***"
        return str(value).lower() if isinstance(value, bool) else str(value)


def environment_names() -> list[str]:
    """All variables that mean something to ``kvweave serve``."""
    return [HOME, CONFIG, *(PREFIX + name.upper() for name in FIELDS)]


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Resolved:
    """Settings from all sources; ``file`` defaults to what ``KVWEAVE_CONFIG`` names.

    Raises ``UnknownOption`` and ``InvalidOption`` with the source, ``ConfigError`` for a file that can't be read.
    """
    if file is None and environ.get(CONFIG):
        file = Path(environ[CONFIG]).expanduser()
    from_environment = {n: environ[PREFIX + n.upper()] for n in FIELDS if environ.get(PREFIX + n.upper())}
    sources: list[tuple[Origin, str, Mapping[str, Any]]] = [
        ("file", str(file), {} if file is None else read_file(file)),
        ("environment", "the environment", from_environment),
        ("flag", "the command line", flags),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(FIELDS, "default")
    for origin, where, source in sources:
        for name, value in source.items():
            values[name] = _convert(name, value, where)
            origins[name] = origin
    return Resolved(ServerSettings(**values), origins)


def check_environment(environ: Mapping[str, str]) -> None:
    """A misspelt ``KVWEAVE_*`` variable would be without effect and without a word: raises ``ConfigError``."""
    known = environment_names()
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"The environment variable '{name}' is unknown. {suggest(name, known)}")


def read_file(path: Path) -> dict[str, Any]:
    """A YAML file of settings. Raises ``ConfigError`` and ``UnknownOption``."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"'{path}' can't be read: {' '.join(str(error).split())[:200]}. Correct it.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"'{path}' isn't a mapping of settings. Write lines such as 'port: 8000'.")
    for name in values:
        if name not in FIELDS:
            raise UnknownOption(str(name), FIELDS, f"'{path}'")
    return values


def parse_seconds(text: str, name: str) -> float:
    """``30``, ``30s``, ``500ms``, ``5m`` or ``1h``. Raises ``InvalidOption``."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", text.strip())
    if match is None:
        raise InvalidOption(f"{name}={text!r} is not a time. Write seconds, or a text such as 500ms, 30s or 5m.")
    return float(match[1]) * _SECONDS[match[2]]


def _share(text: str, memory: int) -> int:
    match = re.fullmatch(r"(\d{1,2}(?:\.\d{1,3})?)%", text.strip())
    return int(float(match[1]) / 100 * memory) if match else parse_size(text, "host_tier")


def _convert(name: str, value: Any, where: str) -> Any:
    """``value`` as the type of the setting, whether it comes as text or as what YAML made of it."""
    hint = _HINTS[name]
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (t for t in typing.get_args(hint) if t is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        items = value.split() if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise InvalidOption(f"{name} in {where}: expected one URL or a list of them.")
    if not isinstance(value, str | int | float | Path):
        raise InvalidOption(f"{name} in {where}: expected one value, got {type(value).__name__}.")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if typing.get_origin(hint) is Literal:
        if text not in typing.get_args(hint):
            raise InvalidOption(f"{name}={text!r} in {where} is unknown. {suggest(text, typing.get_args(hint))}")
        return text
    return _parse(name, hint, text, where)


def _parse(name: str, hint: Any, text: str, where: str) -> Any:
    if hint is bool:
        if text not in ("true", "false"):
            raise InvalidOption(f"{name}={text!r} in {where}: write true or false.")
        return text == "true"
    if hint is Path:
        return Path(text).expanduser()
    try:
        return hint(text)
    except ValueError:
        raise InvalidOption(f"{name}={text!r} in {where} is not a number. Give one such as 4.") from None


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//***@", url)
