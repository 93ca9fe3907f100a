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
    tenant: str = "default"
    home: Path | None = None
    """Folder for fetched and converted models; None: ~/.cache/kvweave."""

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _one_of("anchor", self.anchor, ANCHORS)
        _one_of("attention", self.attention, ("auto", "sdpa", "blocked", "reference"))
        if self.device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise InvalidOption(f"device '{self.device}' is unknown. Use auto, cpu, cuda or cuda:N.")
        for name, most in (("threads", 1024), ("prefill_rows", 2**20)):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, int) and 1 <= value <= most):
                raise InvalidOption(f"{name}={value!r} is out of range. Use 'auto' or 1 to {most:,}.")
        for name in ("max_step_rows", "chunk_size", "min_chunk"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InvalidOption(f"{name}={getattr(self, name)} is out of range. Use 1 or more.")
        if self.min_chunk > self.chunk_size:
            raise InvalidOption(f"min_chunk={self.min_chunk} is above chunk_size={self.chunk_size}. Lower it.")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidOption(f"max_model_len={self.max_model_len} is out of range. Use 2 or more tokens.")
        if self.min_reuse_tokens < 0:
            raise InvalidOption(f"min_reuse_tokens={self.min_reuse_tokens} is out of range. Use 0 or more.")
        parse_size(self.chunk_cache, "chunk_cache")
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
