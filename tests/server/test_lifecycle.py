"""``kvweave serve`` as a process: ports, signals, keys read again, what is shown."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server.live import wait_until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "go on", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "kvweave", "serve", *flags]


def environment(home: Path, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVWEAVE_")}
    return {**own, "KVWEAVE_HOME": str(home), "OMP_NUM_THREADS": "1", **more}


@contextmanager
def process(model: Path, home: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    always = ("--port", str(port), "--threads", "1", "--kv-pool", "16MiB", "--host-tier", "64MiB", "--log-format", "json")
    started = subprocess.Popen(
        command(str(model), *always, *flags),
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert started.poll() is None, started.communicate()
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health/ready").is_success
        return False

    try:
        wait_until(healthy, 120)
        yield started, url
    finally:
        started.kill()
        started.communicate()


def test_running_answers_are_finished_at_sigterm(tiny_model_dir: Path, tmp_path: Path) -> None:
    with process(tiny_model_dir, tmp_path, "--served-model-name", "tiny", "--drain-timeout", "3m") as (server, url):
        got: list[httpx.Response] = []
        running = threading.Thread(target=lambda: got.append(httpx.post(url + COMPLETIONS, json=LONG, timeout=120)))
        running.start()

        def begun() -> bool:
            return 'num_requests_running{engine="0",model_name="tiny"} 1.0' in httpx.get(f"{url}/metrics").text

        wait_until(begun)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        assert httpx.get(f"{url}/health").is_success
        refused = httpx.post(url + COMPLETIONS, json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        running.join(120)
        assert got[0].json()["usage"]["completion_tokens"] == 1500
        out, err = server.communicate(timeout=60)
        assert server.returncode == 0
        assert url in out
        lines = [json.loads(line) for line in err.splitlines()]
        assert any(line.get("path") == COMPLETIONS and line["status"] == 200 for line in lines)


def test_what_doesn_t_finish_in_time_is_told_and_stopped(tiny_model_dir: Path, tmp_path: Path) -> None:
    with process(tiny_model_dir, tmp_path, "--drain-timeout", "100ms") as (server, url):
        body = {**LONG, "max_tokens": 8000, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "request_aborted"
        server.communicate(timeout=60)
        assert server.returncode == 0


def test_keys_are_read_again_at_sighup(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"

    def write(*keys: str) -> None:
        entries = [
            {"name": k, "sha256": hashlib.sha256(k.encode()).hexdigest(), "tenant": "t", "scopes": ["infer"]} for k in keys
        ]
        file.write_text(yaml.safe_dump(entries))

    write("old")
    with process(tiny_model_dir, tmp_path, "--api-key-file", str(file)) as (server, url):

        def works(key: str) -> bool:
            return httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).is_success

        assert works("old")
        assert not works("new")
        write("new")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: works("new"))
        assert not works("old")
        file.write_text("nonsense")
        server.send_signal(signal.SIGHUP)
        assert works("new")  # what can't be used changes nothing


@pytest.mark.parametrize(
    ("flags", "variables", "says"),
    [
        (["--host", "0.0.0.0"], {}, "--insecure"),
        (["--port", "99999"], {}, "65535"),
        (["--kv-pool", "much"], {}, "kv_pool"),
        (["--api-key-file", "/nonexistent/keys.yaml"], {}, "can't be read"),
        ([], {"KVWEAVE_PROT": "1"}, "KVWEAVE_PORT"),
        (["--gate-probation", "1"], {}, "No such option"),
        (["--tool-parser", "hermse"], {}, "Did you mean 'hermes'"),
    ],
)
def test_what_is_wrong_stops_the_start(
    tiny_model_dir: Path, tmp_path: Path, flags: list[str], variables: dict[str, str], says: str
) -> None:
    done = subprocess.run(
        command(str(tiny_model_dir), "--port", str(free_port()), *flags),
        env=environment(tmp_path, **variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kvweave: ")]
    assert says in line


def test_a_port_that_is_taken_shows_before_the_model_is_loaded(tiny_model_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command("no-such-model", "--port", port), env=environment(tmp_path), capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 2
    assert f"127.0.0.1:{port} can't be used" in done.stderr


def test_config_show_tells_origins_and_hides_secrets(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("max_queue: 5\n")
    show = [sys.executable, "-m", "kvweave", "config", "show", "--config", str(tmp_path / "s.yaml"), "--json"]
    variables = environment(tmp_path, KVWEAVE_API_KEY="sk-secret", KVWEAVE_PORT="81")
    done = subprocess.run(show, env=variables, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["max_queue"] == {"value": "5", "origin": "file"}
    assert found["port"] == {"value": "81", "origin": "environment"}
    assert found["api_key"] == {"value": "***", "origin": "environment"}
    assert "sk-secret" not in done.stdout
