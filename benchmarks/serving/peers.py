"""The servers that are compared, as processes of their own: how each is started, and how it is known to be ready."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

NAMES = ("kvweave", "kvweave-fused", "vllm", "llamacpp")
PORT = "{port}"
_GLANCE_S = 0.5
_STOP_S = 20.0
_LAST_WORDS = 300  # characters of a log that says why a server didn't come up


class NotStarted(Exception):
    """A peer that didn't come up, with the end of its log."""


@dataclass(frozen=True)
class Peer:
    """``PORT`` in ``command`` is replaced. ``body`` is merged into every request; ``precompute``: documents that a workload
    knows are computed ahead."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    precompute: bool = False


@dataclass(frozen=True)
class Setup:
    """Where the peers are. What is None is skipped."""

    model: Path
    threads: int
    context: int
    """Longest prompt plus answer, in tokens."""
    users: int
    """Most requests at a time."""
    technique: str | None = None
    vllm_python: Path | None = None
    llama_server: Path | None = None
    gguf: Path | None = None


def make_peers(setup: Setup) -> dict[str, Peer | str]:
    """Each peer by its name, or the reason why it is left out."""
    fused = {"cache": {"reuse": "fused"} | ({"technique": setup.technique} if setup.technique else {})}
    return {
        "kvweave": _kvweave("kvweave", setup, {}),
        "kvweave-fused": _kvweave("kvweave-fused", setup, fused),
        "vllm": _vllm(setup),
        "llamacpp": _llamacpp(setup),
    }


def _kvweave(name: str, setup: Setup, body: Mapping[str, Any]) -> Peer:
    command = (sys.executable, "-m", "kvweave", "serve", str(setup.model), "--port", PORT)
    limits = ("--max-model-len", str(setup.context), "--max-num-seqs", str(setup.users), "--threads", str(setup.threads))
    gate = ("--gate", "force") if body else ()
    return Peer(name, (*command, *limits, *gate), body=body, precompute=bool(body))


def _vllm(setup: Setup) -> Peer | str:
    if setup.vllm_python is None:
        return "--vllm-python isn't given"
    command = (str(setup.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.model))
    limits = ("--max-model-len", str(setup.context), "--max-num-seqs", str(setup.users), "--dtype", "bfloat16")
    shown = ("--enable-prompt-tokens-details", "--port", PORT, "--host", "127.0.0.1")
    # Left to itself, vLLM keeps a core free for its front end; here every server may use all cores.
    cores = {"OMP_NUM_THREADS": str(setup.threads), "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}"}
    return Peer("vllm", (*command, *limits, *shown), {**cores, "VLLM_CPU_KVCACHE_SPACE": "4"})


def _llamacpp(setup: Setup) -> Peer | str:
    if setup.llama_server is None or setup.gguf is None:
        return "--llama-server or --gguf isn't given"
    command = (str(setup.llama_server), "-m", str(setup.gguf), "--port", PORT, "--host", "127.0.0.1")
    limits = ("--parallel", str(setup.users), "--ctx-size", str(setup.users * setup.context))
    return Peer("llamacpp", (*command, *limits, "--threads", str(setup.threads), "--cache-reuse", "64"))


@contextlib.contextmanager
def running(peer: Peer, log: Path, patience_s: float) -> Iterator[str]:
    """The base URL of a peer that is ready; it is stopped at the end, with all it started.

    Raises ``NotStarted`` if it exits or isn't ready after ``patience_s`` seconds.
    """
    port = str(_free_port())
    command = [part.replace(PORT, port) for part in peer.command]
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **peer.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise NotStarted(f"{command[0]}: {error.strerror}") from error
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log, patience_s)
        yield url
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise NotStarted(f"exit code {process.returncode}: {_last_words(log)}")
        with contextlib.suppress(httpx.TransportError):  # not there yet
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        time.sleep(_GLANCE_S)
    raise NotStarted(f"not ready after {patience_s:.0f} s: {_last_words(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The whole group, so that no worker outlives its server."""
    for signal_, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):  # ended by itself
            os.killpg(process.pid, signal_)
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
            process.wait(patience_s)


def _last_words(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-_LAST_WORDS:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
