"""``kvweave explain`` against a server's answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from kvweave.cli import main

RECORD: dict[str, Any] = {
    "id": "chatcmpl-1",
    "prompt_tokens": 1160,
    "tokens": {"exact": 40, "fused": 435, "recomputed": 77, "prefilled": 608},
    "timings": dict.fromkeys(
        ("queue_ms", "lookup_ms", "load_ms", "load_wait_ms", "prefill_ms", "ttft_ms", "decode_ms", "total_ms"), 1.5
    ),
    "cache": {
        "asked": "fused",
        "ran": "fused",
        "technique": "cacheblend",
        "fallback_reason": None,
        "gate": "open",
        "prefix": {
            "hit_tokens": 40,
            "diverged": {
                "token": 40,
                "message": 1,
                "segment": "doc:42",
                "reason": "messages_changed",
                "cost_tokens": 608,
            },
        },
        "segments": [
            {
                "segment": "doc:42",
                "kind": "document",
                "message": 1,
                "span": [40, 552],
                "result": "hit",
                "tier": "disk",
                "tokens": {"fused": 435, "recomputed": 77},
            },
            {
                "segment": "doc:7",
                "kind": "document",
                "message": 1,
                "span": [552, 1064],
                "result": "miss",
                "reason": "evicted",
                "tokens": {"prefilled": 512},
            },
        ],
        "ignored": ["routed_by"],
        "warnings": [],
    },
}
OTHER = RECORD | {"id": "chatcmpl-2"}
Ran = tuple[int, str, str]


class Handler(BaseHTTPRequestHandler):
    """Knows ``chatcmpl-1``, for the key ``secret``."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        other = parse_qs(parts.query).get("compare")
        if self.headers.get("authorization") != "Bearer secret":
            self.answer(401, {"error": {"message": "No API key. Send one."}})
        elif unquote(parts.path) != "/v1/cache/requests/chatcmpl-1":
            self.answer(404, {"error": {"message": f"No request '{unquote(parts.path)}'."}})
        elif other:
            left = RECORD["cache"]["prefix"]["diverged"] if other == ["chatcmpl-2"] else None
            self.answer(200, {"request": RECORD, "compared_with": OTHER, "diverged": left})
        else:
            self.answer(200, RECORD)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ran]]:
    monkeypatch.delenv("KVWEAVE_API_KEY", raising=False)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def call(*args: str, key: str | None = "secret") -> Ran:
            keys = [] if key is None else ["--api-key", key]
            code = main(["explain", *args, "--url", f"http://127.0.0.1:{server.server_port}/v1", *keys])
            return (code, *capsys.readouterr())

        yield call
        server.shutdown()


def test_a_request_is_shown_with_its_segments(explain: Callable[..., Ran]) -> None:
    code, out, err = explain("chatcmpl-1")
    assert (code, err) == (0, "")
    for words in (
        "1,160 = exact 40 + fused 435 + recomputed 77 + prefilled 608",
        "fused (cacheblend; gate open)",
        "messages_changed at token 40, message 1, segment doc:42: 608 tokens",
        "routed_by",
        "evicted",
        "fused 435, recomputed 77",
    ):
        assert words in out


def test_two_requests(explain: Callable[..., Ran]) -> None:
    code, out, _ = explain("chatcmpl-1", "chatcmpl-2")
    assert code == 0
    assert "chatcmpl-1 against chatcmpl-2" in out
    assert "messages_changed at token 40" in out.split("against")[1]
    assert "the same" in explain("chatcmpl-1", "chatcmpl-3")[1]


def test_json_is_what_the_server_says(explain: Callable[..., Ran]) -> None:
    assert json.loads(explain("chatcmpl-1", "--json")[1]) == RECORD
    assert json.loads(explain("chatcmpl-1", "chatcmpl-2", "--json")[1])["compared_with"] == OTHER


def test_the_key_may_come_from_the_environment(explain: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_API_KEY", "secret")
    assert explain("chatcmpl-1", key=None)[0] == 0


@pytest.mark.parametrize(
    ("args", "key", "words"),
    [
        (["chatcmpl-9"], "secret", "No request"),
        (["../segments"], "secret", "/v1/cache/requests/../segments"),  # the id stays one step of the path
        (["chatcmpl-1"], None, "No API key"),
    ],
)
def test_what_the_server_refuses(explain: Callable[..., Ran], args: list[str], key: str | None, words: str) -> None:
    code, out, err = explain(*args, key=key)
    assert (code, out) == (1, "")
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("url", "code"), [("http://127.0.0.1:1", 1), ("http://127.0.0.1:port", 2)])
def test_no_server(capsys: pytest.CaptureFixture[str], url: str, code: int) -> None:
    assert main(["explain", "chatcmpl-1", "--url", url]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert "--url" in line
