"""What a disk tier counts."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DiskStats:
    """Counters since this process opened the folder; ``records``, ``bytes`` and ``free`` are as of now."""

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
    evictions: int
    evicted_bytes: int
    rebuilds: int
    """How often the catalogue was found damaged."""
    rebuild_seconds: float
    """What the last comparison of catalogue and files took."""
    rejected: dict[str, int] = field(default_factory=dict)


COUNTED = ("opens", "hits", "puts", "duplicates", "errors", "corrupt", "evictions", "evicted_bytes")
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
