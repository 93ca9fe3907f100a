"""What this machine does with this model: prefill times and load rates, measured while serving, kept between runs."""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvweave.core.plan import RequestPlan, View
from kvweave.reuse.controller import Costs

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine

LOG = logging.getLogger("kvweave.engine")
_PREFILLS = 64
_LOADS = 32
_LEAST_LOADS = 3  # one slow load, the first of a connection say, must not decide
_LEAST_ROWS = 64  # shorter forwards measure overhead
_LEAST_BYTES = 64 * 1024
_CALIBRATION = (128, 512, 1024)  # tokens
_FORMAT = 1
_SECONDS = (1e-6, 1e5)  # what a forward can take, and
_RATES = (1.0, 1e14)  # what a tier can deliver, in bytes a second: anything else is a broken clock or file


class Profile:
    """Recent samples. ``path`` None: kept in memory only. Old samples make room for new ones, so it follows the machine."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._prefills: deque[tuple[int, int, float]] = deque(maxlen=_PREFILLS)
        """(rows, keys, seconds)"""
        self._loads: dict[str, deque[float]] = {}
        """Tier -> bytes of KV a second."""
        self._costs: Costs | None = None
        if path is not None:
            self._read(path)

    @property
    def measured(self) -> bool:
        """True if prefill times are known."""
        return len(self._prefills) >= len(_CALIBRATION)

    def note_prefill(self, rows: int, keys: int, seconds: float) -> None:
        """One forward of ``rows`` tokens of which the last saw ``keys``."""
        if rows >= _LEAST_ROWS and keys >= rows and _SECONDS[0] < seconds < _SECONDS[1]:
            self._prefills.append((rows, keys, seconds))
            self._costs = None

    def note_load(self, tier: str, size: int, seconds: float) -> None:
        """``size`` bytes of KV (as the model keeps it, however it was stored) in ``seconds``."""
        if size >= _LEAST_BYTES and seconds > 0:
            self._note_rate(tier, size / seconds)

    def _note_rate(self, tier: str, rate: float) -> None:
        if _RATES[0] < rate < _RATES[1]:
            self._loads.setdefault(tier, deque(maxlen=_LOADS)).append(rate)
            self._costs = None

    def costs(self) -> Costs | None:
        """Fitted rates; None until prefills were measured. Bandwidth is the running median of each tier."""
        if not self.measured:
            return None
        if self._costs is None:
            fixed, linear, quadratic = _fit(self._prefills)
            enough = {tier: rates for tier, rates in self._loads.items() if len(rates) >= _LEAST_LOADS}
            bandwidth = {tier: statistics.median(rates) for tier, rates in enough.items()}
            self._costs = Costs(lambda rows, keys: fixed + rows * (linear + quadratic * keys), bandwidth)
        return self._costs

    def save(self) -> None:
        """Keep the samples for the next run; a folder that can't be written costs a warning."""
        if self.path is None:
            return
        data = {"format": _FORMAT, "prefills": list(self._prefills), "loads": {t: list(r) for t, r in self._loads.items()}}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".tmp-")
            with os.fdopen(handle, "w") as file:
                json.dump(data, file)
            os.replace(name, self.path)
        except OSError as error:
            LOG.warning("the profile '%s' can't be kept: %s", self.path, error)
            with suppress(OSError, UnboundLocalError):
                os.unlink(name)

    def _read(self, path: Path) -> None:
        """A profile that can't be read is measured anew."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != _FORMAT:
                return
            for rows, keys, seconds in data["prefills"]:
                self.note_prefill(int(rows), int(keys), float(seconds))
            for tier, rates in data["loads"].items():
                for rate in rates:
                    self._note_rate(str(tier), float(rate))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            LOG.warning("the profile '%s' can't be read (%s): measuring anew", path, error)


def calibrate(engine: Engine, profile: Profile) -> None:
    """Time a few prefills of random tokens; each size twice, the first time is warm-up."""
    parts = engine.parts
    for size in _CALIBRATION:
        n = min(size, parts.context_length, parts.pool.num_slots // 2, parts.max_step_rows)
        slots = engine.admission.reserve(n)
        if slots is None:
            return
        try:
            ids = torch.randint(0, parts.adapter.vocab_size, (n,), generator=torch.Generator().manual_seed(n))
            view = View(0, n, slots, torch.arange(1, n + 1))
            plan = RequestPlan(ids, torch.arange(n), slots, (view,), torch.tensor([n - 1]))
            engine.executor.run([plan])
            start = time.perf_counter()
            engine.executor.run([plan])
            profile.note_prefill(n, n, time.perf_counter() - start)
        finally:
            engine.allocator.release(slots)


def _fit(samples: Iterable[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Least squares of relative errors for fixed + rows * (linear + quadratic * keys), no term below zero."""
    rows, keys, seconds = (np.array(column, float) for column in zip(*samples, strict=True))
    columns = np.stack([np.ones_like(rows), rows, rows * keys], 1)
    left = [0, 1, 2]
    while True:
        weighted = columns[:, left] / seconds[:, None]
        found, *_ = np.linalg.lstsq(weighted, np.ones_like(seconds), rcond=None)
        if found.min() >= 0 or len(left) == 1:
            terms = np.zeros(3)
            terms[left] = np.maximum(found, 0)
            return float(terms[0]), float(terms[1]), float(terms[2])
        left.pop(int(found.argmin()))
