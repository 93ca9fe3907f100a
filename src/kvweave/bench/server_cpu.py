"""CPU seconds of a server on this machine: on a busy one they say more than wall time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

_STEP = 0.01  # seconds between two looks


@dataclass(frozen=True)
class ServerCpu:
    """The process that listens on a URL's port, and its children; none if it isn't here or isn't ours to see."""

    process: psutil.Process | None

    @classmethod
    def of(cls, url: str) -> ServerCpu:
        parts = urlsplit(url)
        if parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            return cls(None)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for process in psutil.process_iter():
            try:
                connections = process.net_connections(kind="tcp")
            except (psutil.Error, OSError):
                continue
            if any(c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port for c in connections):
                return cls(process)
        return cls(None)

    def seconds(self) -> float | None:
        """User and system time so far, children included."""
        if self.process is None:
            return None
        total = 0.0
        try:
            for process in (self.process, *self.process.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            return None
        return total

    def watch(self) -> Watch | None:
        """Look again and again, to tell later what had been used at some moment."""
        return None if self.process is None else Watch(self)


@dataclass
class Watch:
    """Samples of ``ServerCpu.seconds`` while a request runs."""

    cpu: ServerCpu
    samples: list[tuple[float, float]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._start = time.perf_counter()
        self._look()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def until(self, seconds: float) -> float | None:
        """CPU seconds from the begin until so many seconds later; ends the watch."""
        self._stop.set()
        self._thread.join()
        self._look()
        if len(self.samples) < 2:
            return None
        at = self._start + seconds
        used = next((cpu for when, cpu in self.samples if when >= at), self.samples[-1][1])
        return used - self.samples[0][1]

    def _run(self) -> None:
        while not self._stop.wait(_STEP):
            self._look()

    def _look(self) -> None:
        used = self.cpu.seconds()
        if used is not None:
            self.samples.append((time.perf_counter(), used))
