"""CPU seconds of the server under load, where it runs on this machine: the process that listens on its port, and those it
started."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

import psutil

_PORTS = {"http": 80, "https": 443}


class ServerCpu:
    """Reads the CPU time of ``processes``, in steps of the system's clock tick (10 ms on Linux)."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._seconds = dict.fromkeys(processes, 0.0)

    def __call__(self) -> float:
        """User and system seconds so far. A process that has ended keeps what it had at the reading before."""
        for process in self._seconds:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._seconds[process] = times.user + times.system
        return sum(self._seconds.values())


def find_server(base: str) -> ServerCpu | None:
    """The server behind a URL; None where it is elsewhere, or the system doesn't tell who listens."""
    parts = urlsplit(base)
    if not _is_local(parts.hostname or ""):
        return None
    try:
        listening = _listeners(parts.port or _PORTS[parts.scheme])
        processes = {one for top in listening for one in (top, *top.children(recursive=True))}
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return None
    return ServerCpu(sorted(processes, key=lambda process: process.pid)) if processes else None


def _listeners(port: int) -> list[psutil.Process]:
    found = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
    }
    return [psutil.Process(pid) for pid in found]


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
