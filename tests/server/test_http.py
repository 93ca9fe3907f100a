"""What holds for every endpoint: errors in one shape, ids, limits, keys, who may talk to the server at all."""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler
from pathlib import Path

import httpx
import pytest
import yaml

from kvweave.server.logs import JsonFormatter
from tests.server.live import JSON, Live, live_server, wait_until

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def live(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tiny_model_dir, tmp_path_factory.mktemp("home"), max_body="4KiB") as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    home = tmp_path_factory.mktemp("home")
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant, "scopes": scopes, **more}
        for name, tenant, scopes, more in (
            ("acme", "acme", ["infer"], {}),
            ("rival", "rival", ["infer"], {"limits": {"max_concurrent": 1}}),
            ("clerk", "acme", ["cache"], {}),
        )
    ]
    (home / "keys.yaml").write_text(yaml.safe_dump(keys))
    with live_server(tiny_model_dir, home, api_key_file=home / "keys.yaml") as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, str]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert response.headers["x-request-id"]
    assert (response.headers.get("x-should-retry") == "false") == (400 <= status < 500 and status != 429)
    return dict(error)


def test_an_answer_and_its_ids(live: Live) -> None:
    response = live.post(CHAT, HELLO, **{"x-request-id": "mine-1"})
    answer = response.json()
    assert response.headers["x-request-id"] == "mine-1"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3
    details = usage["prompt_tokens_details"]
    classes = ("cached", "prefilled", "recomputed", "fused", "repos", "drop_skipped")
    assert sum(details[f"{name}_tokens"] for name in classes) == usage["prompt_tokens"]
    made_up = live.post(CHAT, HELLO, **{"x-request-id": "has spaces and\ttabs"}).headers["x-request-id"]
    assert made_up.startswith("req-")


def test_errors_have_one_shape(live: Live) -> None:
    error_of(live.get("/v1/nothing"), 404, "not_found")
    assert "GET" in error_of(live.get(CHAT), 405, "invalid_request")["message"]
    assert live.get(CHAT).headers["allow"] == "POST"
    assert "set_default_openai_api" in error_of(live.post("/v1/responses", {}), 404, "not_found")["message"]
    error_of(live.post(CHAT, {"messages": []}), 400, "invalid_request")
    error_of(live.post(CHAT, [1]), 400, "invalid_request")
    error_of(live.post(CHAT, {**HELLO, "model": "gpt"}), 404, "model_not_found")
    error_of(live.post(CHAT, {**HELLO, "cache": {"technique": "cachblend"}}), 400, "unsupported_technique")
    error_of(live.post(CHAT, {**HELLO, "cache": {"reuse": "exact", "technique": "epic"}}), 400, "conflicting_fields")
    error_of(live.post(CHAT, {**HELLO, "cache": {"reuze": "exact"}}), 400, "unknown_cache_field")
    long = {**HELLO, "messages": [{"role": "user", "content": "x" * 3000}], "max_tokens": 10**6}
    assert live.post(CHAT, long | {"max_tokens": 1}).status_code == 200


def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(live: Live) -> None:
    host, _, port = live.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 99999999999"]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert b" 413 " in connection.recv(100)


def test_bodies_are_json_and_not_too_large(live: Live) -> None:
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        response = httpx.post(live.url + CHAT, content=json.dumps(HELLO), headers=headers)
        error_of(response, 415, "unsupported_media_type")
    error_of(httpx.post(live.url + CHAT, content=b"{", headers=JSON), 400, "invalid_request")
    error_of(httpx.post(live.url + CHAT, content=b"\xff", headers=JSON), 400, "invalid_request")
    error_of(httpx.post(live.url + CHAT, content=b"x" * 5000, headers=JSON), 413, "request_too_large")

    def pieces() -> Iterator[bytes]:  # without a length in front
        for _ in range(9):
            yield b" " * 1000

    error_of(httpx.post(live.url + CHAT, content=pieces(), headers=JSON), 413, "request_too_large")


def test_pages_of_other_names_get_nothing(live: Live, keyed: Live) -> None:
    error_of(live.get("/health", host="evil.example"), 403, "permission_error")
    for host in ("localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert live.get("/health", host=host).status_code == 200
    assert keyed.get("/health", host="any.example").status_code == 200  # a key is protection enough


def test_unknown_fields_are_named(live: Live) -> None:
    response = live.post(CHAT, {**HELLO, "no_stop_trim": True, "cache": {"explain": True}})
    assert response.headers["x-kvweave-ignored"] == "no_stop_trim"
    assert response.json()["cache"]["ignored"] == ["no_stop_trim"]
    assert "x-kvweave-ignored" not in live.post(CHAT, HELLO).headers


def test_open_endpoints(live: Live) -> None:
    assert live.get("/health").json() == {"status": "ok"}
    assert live.get("/health/ready").json() == {"status": "ready"}
    assert live.get("/version").json()["version"]
    metrics = live.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"}' in metrics.text
    (model,) = live.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["kvweave"]["reuse"]) == ("tiny", 8192, "exact")
    assert {"name": "question", "gate": "closed"} in model["kvweave"]["techniques"]


def test_errors_are_counted_by_code(live: Live) -> None:
    def count() -> float:
        lines = [line for line in live.get("/metrics").text.splitlines() if 'errors_total{code="model_not_found"}' in line]
        return float(lines[0].split()[-1]) if lines else 0.0

    before = count()
    live.post(CHAT, {**HELLO, "model": "gpt"})
    assert count() == before + 1


def test_keys_and_scopes(keyed: Live) -> None:
    refused = keyed.post(CHAT, HELLO)
    error_of(refused, 401, "missing_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    error_of(keyed.post(CHAT, HELLO, **bearer("nobody")), 401, "invalid_api_key")
    error_of(keyed.post(CHAT, HELLO, **bearer("clerk")), 403, "scope_missing")
    assert keyed.post(CHAT, HELLO, **bearer("acme")).status_code == 200
    assert keyed.get("/v1/models", **bearer("acme")).status_code == 200
    error_of(keyed.get("/v1/models"), 401, "missing_api_key")


def test_tenants_and_salts_find_their_own_alone(keyed: Live) -> None:
    body = {**HELLO, "messages": [{"role": "user", "content": "a text of somebody's own, long enough to be found again"}]}

    def found(key: str, salt: str = "") -> bool:
        """Whether the text was; the template's first tokens may have been asked before."""
        response = keyed.post(CHAT, {**body, "cache_salt": salt}, **bearer(key))
        return bool(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 40)

    assert [found("acme"), found("acme")] == [False, True]
    assert [found("rival"), found("rival")] == [False, True]
    assert [found("acme", "pepper"), found("acme", "pepper")] == [False, True]


def test_a_key_that_runs_as_many_as_it_may_is_told_when_to_come_back(keyed: Live) -> None:
    long = {**HELLO, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", keyed.url + CHAT, json=long, headers=bearer("rival"), timeout=60) as stream:
        pieces = stream.iter_bytes()  # dropping it would close the connection
        next(pieces)
        busy = keyed.post(CHAT, HELLO, **bearer("rival"))
        error_of(busy, 429, "rate_limited")
        assert 1 <= int(busy.headers["retry-after"]) <= 60
    wait_until(keyed.idle)
    assert keyed.post(CHAT, HELLO, **bearer("rival")).status_code == 200


def test_a_full_queue_is_told(tiny_model_dir: Path, tmp_path: Path) -> None:
    with live_server(tiny_model_dir, tmp_path, max_queue=1, max_num_seqs=1) as live:
        long = {**HELLO, "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", live.url + CHAT, json=long, timeout=60) as running:
            pieces = running.iter_bytes()
            next(pieces)
            waiting = threading.Thread(target=live.post, args=(CHAT, HELLO), daemon=True)
            waiting.start()
            wait_until(lambda: live.state.loop.waiting == 1)
            refused = live.post(CHAT, HELLO)
            error_of(refused, 503, "overloaded")
            assert refused.headers["retry-after"]
        waiting.join(60)
        assert not waiting.is_alive()


def test_one_line_a_request_and_no_text_in_it(live: Live) -> None:
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger, handler = logging.getLogger("kvweave.server"), QueueHandler(lines)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        body = {**HELLO, "messages": [{"role": "user", "content": "confidential"}], "cache_salt": "pepper"}
        live.post(CHAT, body, **{"x-request-id": "line-1"})
        live.get("/health")
        line = lines.get(timeout=30)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    fields = line.__dict__["fields"]
    assert fields.items() >= {"request_id": "line-1", "status": 200, "asked": "exact", "ran": "exact"}.items()
    assert fields["prefilled_tokens"] > 0
    assert "confidential" not in line.getMessage()
    assert "pepper" not in line.getMessage()
    assert json.loads(JsonFormatter().format(line)).items() >= {"request_id": "line-1", "level": "info"}.items()
    assert lines.empty()  # polling isn't worth a line
