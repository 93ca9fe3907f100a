"""Servers for tests of remote tiers: real ones where they are installed, and small ones that misbehave on purpose."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class RedisServer:
    """A redis-server (or valkey-server) without persistence; ``start`` again after ``kill`` gives an empty one."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        pytest.importorskip("redis", reason="needs kvweave[redis]")
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("needs redis-server or valkey-server on the PATH")
        self.port = free_port()
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no", *options]
        if tls:
            self._command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no", *certificate(folder)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if self._process.poll() is not None:
                pytest.skip(f"{self._command[0]} doesn't start with {self._command[1:]}")
            time.sleep(0.01)
        raise AssertionError("redis-server doesn't listen")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def running(self) -> Iterator[RedisServer]:
        self.start()
        try:
            yield self
        finally:
            self.kill()


def certificate(folder: Path) -> list[str]:
    """Options for a new certificate of 127.0.0.1, signed by itself: ``cert.pem`` in the folder."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl on the PATH")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert]


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Endpoint of an S3 server in memory that has this bucket."""
    pytest.importorskip("obstore", reason="needs kvweave[s3]")
    moto = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=10).close()
        yield endpoint
    finally:
        server.stop()


@contextmanager
def http_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Address of a server that lets ``answer`` deal with every request."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):
                answer(self)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@contextmanager
def tcp_server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Port of a server that runs ``serve`` in a thread for every connection; all are closed in the end."""
    connections: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                connections.append(connection)
                threading.Thread(target=quietly, args=(connection,), daemon=True).start()

    def quietly(connection: socket.socket) -> None:
        with suppress(OSError):
            serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                connection.close()


def silence(connection: socket.socket) -> None:
    """Take everything, answer nothing."""
    while connection.recv(65536):
        pass


class Proxy:
    """Passes bytes on to a port; ``delay`` [s] before each piece of an answer, ``piece`` bytes at most."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.delay = 0.0
        self.piece = 65536
        self.connections = 0

    def serve(self, connection: socket.socket) -> None:
        self.connections += 1
        with socket.create_connection(("127.0.0.1", self._port)) as upstream:
            threading.Thread(target=self._forward, args=(connection, upstream), daemon=True).start()
            while data := upstream.recv(self.piece):
                time.sleep(self.delay)
                connection.sendall(data)

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
