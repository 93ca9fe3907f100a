"""Configuration: frozen values, checked when they are made. Unknown keys are refused with a suggestion.

Only the command line reads environment variables; it hands values down in these classes.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidOption, UnknownOption, suggest

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}

ANCHORS = ("bos", "head")
CONTROLLERS = ("auto", "paper", "off")
_DISK_SIZE = "10GiB"


@dataclass(frozen=True)
class Tiers:
    """Where chunk KV is kept beyond host memory. Nothing here is on until ``disk`` or ``remote`` is given.

    Sizes are bytes, or texts like ``"4GiB"``; times are seconds.
    """

    disk: str | Path | None = None
    """A folder, or ``FOLDER:SIZE``; without a size it may hold 10GiB."""
    remote: str | tuple[str, ...] = ()
    """``redis://host:port/db`` or ``s3://bucket/prefix``, with options behind a question mark (docs/tiers.md)."""
    codec: str = "raw"
    """How records are kept, in every tier: raw (bit for bit), int8 or fp8 (lossy, and then no chunk is ever exact)."""
    eviction: str = "lru"
    """Of the disk tier: lru, cost, lfu or fifo."""
    tenant_quota: int | str | None = None
    """Most bytes of one tenant in host memory and on disk, each."""
    threads: int = 4
    """I/O threads of each tier."""
    staging: int | str = "512MiB"
    """Memory for loads on their way."""
    write_queue: int | str = "1GiB"
    """Memory for records that wait to be written, per tier."""
    lookup_timeout: float = 2.0
    load_timeout: float = 10.0
    direct: str = "auto"
    """O_DIRECT on disk: auto (where the file system allows it), on, off."""
    durability: str = "cache"
    """cache: a power failure may lose records (never serve wrong ones); durable: every record is synced."""
    secret_file: Path | None = None
    """A file whose bytes key the tenants' keys. Machines that share a store need the same one."""

    def __post_init__(self) -> None:
        _one_of("codec", self.codec, ("raw", "int8", "fp8"))
        _one_of("eviction", self.eviction, ("lru", "cost", "lfu", "fifo"))
        _one_of("direct", self.direct, ("auto", "on", "off"))
        _one_of("durability", self.durability, ("cache", "durable"))
        if self.tenant_quota is not None:
            parse_size(self.tenant_quota, "tenant_quota")
        for name in ("staging", "write_queue"):
            parse_size(getattr(self, name), name)
        for name in ("lookup_timeout", "load_timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= 3600:
                raise InvalidOption(f"{name}={value!r} is out of range. Use seconds above 0, at most 3600.")
        if not isinstance(self.threads, int) or not 1 <= self.threads <= 256:
            raise InvalidOption(f"threads={self.threads!r} is out of range. Use 1 to 256 I/O threads.")
        if self.disk is not None:
            self.disk_folder()

    @classmethod
    def of(cls, **options: Any) -> Tiers:
        """From keywords; an unknown one raises ``UnknownOption``."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOption(name, known, "the tiers")
        return cls(**options)

    def disk_folder(self) -> tuple[Path, int]:
        """The folder and its capacity in bytes."""
        text = str(self.disk)
        match = re.fullmatch(r"(.*):(\d[\d.]*\s*[A-Za-z]*)", text)
        folder, size = (match[1], match[2]) if match else (text, _DISK_SIZE)
        if not folder.strip():
            raise InvalidOption("The disk tier has no folder. Write FOLDER or FOLDER:SIZE.")
        return Path(folder).expanduser(), parse_size(size, "disk tier")

    @property
    def remotes(self) -> tuple[str, ...]:
        return (self.remote,) if isinstance(self.remote, str) else tuple(self.remote)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs.

    Sizes are bytes, or texts like ``"4GiB"``. ``"auto"`` means chosen by measurement (dtype, threads, attention,
    prefill_rows) or from the machine (device, kv_pool).
    """

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, float32, bfloat16."""
    threads: int | str = "auto"
    """CPU threads; "auto" measures. torch has one such setting per process."""
    attention: str = "auto"
    """auto, sdpa, blocked, reference."""
    prefill_rows: int | str = "auto"
    """Rows of a static prefill per forward pass; smaller blocks keep activations in cache."""
    max_step_rows: int = 8192
    """Most rows in one forward pass; longer fused prompts are cut, and each part chooses its own rows."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens; None: the model's own limit."""
    kv_pool: int | str = "auto"
    """Memory for KV of running requests and the prefix cache."""
    max_num_seqs: int = 256
    """Most sequences that run at a time."""
    swap_space: int | str = "1GiB"
    """Memory for KV of requests that had to give their slots back; what doesn't fit is computed again."""
    chunk_cache: int | str = "2GiB"
    """Memory for chunk records."""
    anchor: str = "head"
    """What a document is computed behind: bos (serves any prompt) or head (the prompt's text in front of the first
    document: closer to full prefill, but a record serves one head)."""
    chunk_size: int = 512
    min_chunk: int = 64
    isolated_pieces: bool = False
    min_reuse_tokens: int = 256
    """Fewer fused tokens than this aren't worth an approximation: the exact path runs."""
    tiers: Tiers = dataclasses.field(default_factory=Tiers)
    """Disk and remote stores behind the chunk cache."""
    controller: str = "auto"
    """For chunks that lie below host memory: auto and paper set the recompute ratio from measured rates and don't load where
    that would lose; off takes the technique's ratio."""
    chat_template: Path | None = None
    """A Jinja file, instead of the model's own template."""
    content_format: str = "auto"
    """How a chat template gets the parts of a message: string (joined by new lines), parts (a list), or auto: as it is
    found to want them."""
    tenant: str = "default"
    home: Path | None = None
    """Folder for fetched and converted models; None: ~/.cache/kvweave."""

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _one_of("anchor", self.anchor, ANCHORS)
        _one_of("controller", self.controller, CONTROLLERS)
        _one_of("content_format", self.content_format, ("auto", "string", "parts"))
        if not isinstance(self.tiers, Tiers):
            raise InvalidOption("tiers: expected kvweave.Tiers(disk=..., remote=...).")
        _one_of("attention", self.attention, ("auto", "sdpa", "blocked", "reference"))
        if self.device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise InvalidOption(f"device '{self.device}' is unknown. Use auto, cpu, cuda or cuda:N.")
        for name, most in (("threads", 1024), ("prefill_rows", 2**20)):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, int) and 1 <= value <= most):
                raise InvalidOption(f"{name}={value!r} is out of range. Use 'auto' or 1 to {most:,}.")
        for name in ("max_step_rows", "max_num_seqs", "chunk_size", "min_chunk"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InvalidOption(f"{name}={getattr(self, name)} is out of range. Use 1 or more.")
        if self.min_chunk > self.chunk_size:
            raise InvalidOption(f"min_chunk={self.min_chunk} is above chunk_size={self.chunk_size}. Lower it.")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidOption(f"max_model_len={self.max_model_len} is out of range. Use 2 or more tokens.")
        if self.min_reuse_tokens < 0:
            raise InvalidOption(f"min_reuse_tokens={self.min_reuse_tokens} is out of range. Use 0 or more.")
        parse_size(self.chunk_cache, "chunk_cache")
        parse_size(self.swap_space, "swap_space")
        if self.kv_pool != "auto":
            parse_size(self.kv_pool, "kv_pool")

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """From keywords; an unknown one raises ``UnknownOption``."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownOption(name, known, "the engine")
        return cls(**options)


def parse_size(value: int | str, name: str = "size") -> int:
    """Bytes of ``1024``, ``"64MiB"``, ``"1.5GiB"``; raises ``InvalidOption``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if not match or match[2] not in _UNITS or len(match[1]) > 30:
        raise InvalidOption(f"{name}={value!r} is not a size. Write bytes or a size like 512MiB or 4GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidOption(f"{name}={value!r} is unknown. {suggest(str(value), allowed)}")
