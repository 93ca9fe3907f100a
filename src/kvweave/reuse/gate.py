"""The quality gate: fused reuse is served only where its distance to full prefill was measured and is small enough.

A measurement (``kvweave eval gate``) leaves one record per model and technique; ``Gates`` tells from it what a request may
do, ``choose_mode`` which mode then runs. Anything that can't be read, or was measured under other settings, is closed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal
from urllib.parse import quote

from kvweave.config import EngineConfig
from kvweave.core.keys import ModelFingerprint
from kvweave.errors import ConfigError
from kvweave.reuse.base import Technique
from kvweave.store.files import replace_file

LOG = logging.getLogger("kvweave.reuse")

GateState = Literal["closed", "open", "forced"]
Asked = Literal["off", "exact", "fused", "auto"]
Run = Literal["off", "exact", "fused", "fused_if_faster"]

DEFAULT_LIMIT = 0.05
"""Nats."""
_FORMAT = 1
_NUMBERS = ("limit", "mean", "upper", "first_mean", "first_upper")
_TEXTS = ("fingerprint", "technique", "model", "data", "measured_at", "attention", "version")
_KINDS: dict[str, type | UnionType] = {
    **dict.fromkeys(_NUMBERS, int | float),
    **dict.fromkeys(_TEXTS, str),
    **{"options": dict, "settings": dict, "prompts": int},
}


@dataclass(frozen=True)
class GateRecord:
    """What one measurement found. Divergences are KL(full || fused) in nats, infinite where a distribution broke."""

    fingerprint: str
    """Hex digest of the ``ModelFingerprint``."""
    technique: str
    options: Mapping[str, Any]
    """Of the technique, its recompute ratio among them."""
    settings: Mapping[str, Any]
    """``gate_settings`` of the engine that measured."""
    limit: float
    mean: float
    """Over the first answer tokens of each prompt, then over prompts."""
    upper: float
    """Upper 95 % bound of ``mean``."""
    first_mean: float
    """The same for the first answer token alone."""
    first_upper: float
    prompts: int
    data: str
    """What was asked: a name and the digest of its content."""
    model: str
    """As it was named then."""
    measured_at: str
    """ISO 8601, UTC."""
    attention: str
    """Backend that computed it. Not in ``settings``: it is chosen anew at every start, and rounds differently at most."""
    version: str
    """Of kvweave."""

    @property
    def passed(self) -> bool:
        return self.upper <= self.limit

    @property
    def ratio(self) -> float | None:
        """The recompute ratio it was measured at; None for techniques without one."""
        return self.options.get("ratio")

    def covers(self, technique: Technique, settings: Mapping[str, Any]) -> bool:
        """Whether it says something about ``technique``: measured as it runs now, or with a smaller recompute ratio."""
        asked = technique_options(technique)
        if technique.name != self.technique or dict(settings) != self.settings or asked.keys() != self.options.keys():
            return False
        return all(value == self.options[name] or _is_more(name, value, self.options[name]) for name, value in asked.items())


def _is_more(name: str, asked: Any, measured: Any) -> bool:
    return name == "ratio" and isinstance(asked, int | float) and isinstance(measured, int | float) and asked >= measured


def technique_options(technique: Technique) -> dict[str, Any]:
    """The fields of a technique; what JSON can't hold as text."""
    fields = [f.name for f in dataclasses.fields(technique)]  # type: ignore[arg-type]
    values = {name: getattr(technique, name) for name in fields}
    return {n: v if isinstance(v, bool | int | float | str | None) else str(v) for n, v in values.items()}


def gate_settings(config: EngineConfig) -> dict[str, Any]:
    """What decides, beside model and technique, how far a fused answer is off: how documents are computed."""
    return {"anchor": config.anchor, "chunk_size": config.chunk_size, "isolated_pieces": config.isolated_pieces}


class GateStore:
    """Records as files ``FINGERPRINT-TECHNIQUE.json`` in ``home/gates``, readable by their owner alone."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "gates"

    def path(self, fingerprint: str, technique: str) -> Path:
        return self.folder / f"{fingerprint}-{quote(technique, safe='')}.json"

    def write(self, record: GateRecord) -> Path:
        """Keep a record in place of the one before it. Raises ``ConfigError`` if the folder can't be written."""
        data = {"format": _FORMAT} | dataclasses.asdict(record)
        data |= {name: None for name in _NUMBERS if not math.isfinite(data[name])}
        path = self.path(record.fingerprint, record.technique)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(os.fspath(path), json.dumps(data, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(
                f"The gate record '{path}' can't be written: {error.strerror}. Set KVWEAVE_HOME to a folder that can."
            ) from error
        return path

    def read(self, fingerprint: str, technique: str) -> GateRecord | None:
        """The record of a model and technique; None, with a warning, if it can't be used."""
        record = self._read(path := self.path(fingerprint, technique))
        if record is not None and (record.fingerprint, record.technique) != (fingerprint, technique):
            LOG.warning("the gate record '%s' is of another model or technique: the gate stays closed", path)
            return None
        return record

    def records(self) -> Iterator[GateRecord]:
        """All that can be read, by file name."""
        for path in sorted(self.folder.glob("*.json")):
            if (record := self._read(path)) is not None:
                yield record

    def _read(self, path: Path) -> GateRecord | None:
        try:
            return _parse(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            LOG.warning("the gate record '%s' can't be used (%s): the gate stays closed. Measure it again.", path, error)
            return None


def _parse(text: bytes) -> GateRecord:
    """Raises ``ValueError`` for everything that isn't a whole record of this format."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise ValueError(f"it isn't of format {_FORMAT}")
    names = {f.name for f in dataclasses.fields(GateRecord)}
    if data.keys() != names:
        raise ValueError(f"fields are missing or unknown: {', '.join(sorted(data.keys() ^ names))}")
    data |= {name: math.inf for name in _NUMBERS if data[name] is None}
    for name, kind in _KINDS.items():
        if not isinstance(data[name], kind) or isinstance(data[name], bool):
            raise ValueError(f"'{name}' is of the wrong type")
    if any(math.isnan(data[name]) or data[name] < 0 for name in _NUMBERS):
        raise ValueError("a number is out of range")
    return GateRecord(**data)


@dataclass(frozen=True)
class Gate:
    """Whether a technique may be served, and how far off it is thought to be at most (nats; None: unknown)."""

    state: GateState
    estimate: float | None = None


_Stamp = tuple[int, int, int]


class Gates:
    """The gates of one loaded model. A record written meanwhile counts from the next look on, without a restart.

    Threads may share it: the worst that a race does is to read a file twice.
    """

    def __init__(
        self, store: GateStore, fingerprint: ModelFingerprint, settings: Mapping[str, Any], *, force: bool = False
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint.digest.hex()
        self._settings = dict(settings)
        self._force = force
        self._seen: dict[str, tuple[_Stamp | None, GateRecord | None]] = {}
        self._shut: dict[str, GateRecord | None] = {}

    def of(self, technique: Technique) -> Gate:
        """The gate of a technique with its options. Forced gates are never closed; only their estimate can be missing."""
        record = self._record(technique.name)
        covered = record is not None and record.covers(technique, self._settings)
        estimate = record.upper if record is not None and covered else None
        if self._force:
            return Gate("forced", estimate)
        shut = technique.name in self._shut and self._shut[technique.name] == record
        is_open = record is not None and covered and record.passed and not shut
        return Gate("open" if is_open else "closed", estimate)

    def close(self, technique: str) -> None:
        """Live comparisons with full prefill found it too far off: closed in this process until it is measured again."""
        self._shut[technique] = self._record(technique)

    def _record(self, technique: str) -> GateRecord | None:
        stamp = _stamp(self._store.path(self._fingerprint, technique))
        seen = self._seen.get(technique)
        if seen is None or seen[0] != stamp:
            seen = self._seen[technique] = (stamp, self._store.read(self._fingerprint, technique))
        return seen[1]


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass(frozen=True)
class ModeChoice:
    """What runs. ``fused_if_faster`` leaves it to the controller: fused where it expects a lower TTFT, else exact."""

    run: Run
    fallback_reason: str | None = None


def choose_mode(asked: Asked, gate: Gate, *, fused_allowed: bool, max_divergence: float = DEFAULT_LIMIT) -> ModeChoice:
    """Which mode runs.

    ``max_divergence`` (nats) is the request's, or else the server's: an open gate whose estimate is above it doesn't fuse.
    What was asked as ``fused`` says why it isn't; ``auto`` is the server's choice and gives no reason, and it doesn't fuse
    without an estimate.
    """
    if asked in ("off", "exact"):
        return ModeChoice(asked)
    above = gate.estimate is not None and gate.estimate > max_divergence
    if asked == "auto":
        known = gate.state != "closed" and gate.estimate is not None
        return ModeChoice("fused_if_faster" if fused_allowed and known and not above else "exact")
    if not fused_allowed:
        return ModeChoice("exact", "fused_disabled")
    if gate.state == "closed" or (gate.state == "open" and above):
        return ModeChoice("exact", "quality_gate")
    return ModeChoice("fused")
