"""What a disk tier counts."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DiskStats:
    """Counters since this process opened the folder; ``records``, ``bytes``, ``free`` and pins are as of now."""

    records: int
    bytes: int
    """With what is being written."""
    capacity: int | None
    free: int
    """Of the file system."""
    opens: int
    hits: int
    puts: int
    duplicates: int
    errors: int
    corrupt: int
    capacity_evictions: int
    """Because the tier or the file system was full."""
    quota_evictions: int
    """Because their own scope was at its maximum."""
    evicted_bytes: int
    rebuilds: int
    """How often the catalogue was found damaged."""
    rebuild_seconds: float
    """What the last comparison of catalogue and files took."""
    pins: int = 0
    pinned_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    @property
    def evictions(self) -> int:
        return self.capacity_evictions + self.quota_evictions


_EVICTED = ("capacity_evictions", "quota_evictions", "evicted_bytes")
COUNTED = ("opens", "hits", "puts", "duplicates", "errors", "corrupt", *_EVICTED)
REASONS = ("no_room", "quota", "read_only", "stale")


class Counts:
    """Numbers by name: those of ``COUNTED``, and refused writes by reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def of(self, names: tuple[str, ...]) -> dict[str, int]:
        """All of one moment."""
        with self._lock:
            return {name: self._counts[name] for name in names}
