"""The cache's endpoints over a tiny model: scopes, warming, listing, pinning, erasing, explaining."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvweave.core.report import TOKEN_KINDS
from kvweave.llm import LLM
from kvweave.reuse.gate import Gates, GateStore, gate_settings
from kvweave.server.app import create_app
from kvweave.server.erasing import digest_of
from kvweave.server.keys import Caller, KeyRing
from kvweave.server.keys import digest_of as key_digest
from kvweave.server.metrics import ServerMetrics
from kvweave.server.request_log import RequestLog
from kvweave.server.segments import SegmentDirectory
from kvweave.server.settings import ServerSettings
from kvweave.server.state import ServerState
from tests.server.offices import document

CALLERS = {
    "user": Caller("user", "acme", frozenset(("infer",))),
    "owner": Caller("owner", "acme", frozenset(("infer", "cache"))),
    "other": Caller("other", "rival", frozenset(("infer", "cache"))),
    "admin": Caller("admin", "ops", frozenset(("infer", "cache", "admin"))),
}
Body = dict[str, Any]


class Client:
    """The server as one key sees it."""

    def __init__(self, http: TestClient, key: str = "owner") -> None:
        self.http, self.headers = http, {"authorization": f"Bearer {key}"}

    def as_(self, key: str) -> Client:
        return Client(self.http, key)

    def get(self, path: str, status: int = 200, **params: Any) -> Any:
        return self._sent(self.http.get(path, params=params, headers=self.headers), status)

    def post(self, path: str, body: Body, status: int = 200, **params: Any) -> Any:
        return self._sent(self.http.post(path, json=body, params=params, headers=self.headers), status)

    def delete(self, path: str, status: int = 200, **params: Any) -> Any:
        return self._sent(self.http.delete(path, params=params, headers=self.headers), status)

    @staticmethod
    def _sent(response: Any, status: int) -> Any:
        assert response.status_code == status, response.text
        return response.json() if status == 200 else response.json()["error"]


@pytest.fixture
def state(tiny_model_dir: Path, tmp_path: Path) -> Iterator[ServerState]:
    options = {"chunk_size": 64, "min_chunk": 16, "min_reuse_tokens": 0, "chunk_cache": "4MiB"}
    with LLM(tiny_model_dir, threads=1, **options) as llm, ThreadPoolExecutor(2) as workers:  # type: ignore[arg-type]
        yield ServerState(
            settings=ServerSettings(model=str(tiny_model_dir), drain_timeout="2s"),
            llm=llm,
            keys=KeyRing({key_digest(name): caller for name, caller in CALLERS.items()}),
            gates=Gates(GateStore(tmp_path), llm.built.fingerprint, gate_settings(llm.config), force=True),
            requests=RequestLog(),
            metrics=ServerMetrics("tiny", llm.engine),
            segments=SegmentDirectory(llm),
            workers=workers,
        )


@pytest.fixture
def client(state: ServerState) -> Iterator[Client]:
    with TestClient(create_app(state), base_url="http://127.0.0.1") as http:
        yield Client(http)


def part(seed: int, label: str | None = None, n: int = 96, **mark: Any) -> Body:
    label_of = {"segment": label} if label else {}
    return {"type": "text", "text": document(seed, n=n).text, "cache": {**label_of, **mark}}


def chat(*parts: Body | str, **fields: Any) -> Body:
    content = [one if isinstance(one, dict) else {"type": "text", "text": one} for one in parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0, **fields}


def ask(client: Client, *parts: Body | str, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", chat(*parts, **fields))


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("get", "/v1/cache/segments", "cache"),
        ("get", "/v1/cache/segments/doc:1", "cache"),
        ("delete", "/v1/cache/segments/doc:1", "cache"),
        ("post", "/v1/cache/segments/doc:1/pin", "cache"),
        ("delete", "/v1/cache/segments/doc:1/pin", "cache"),
        ("get", "/v1/cache/stats", "cache"),
        ("delete", "/v1/cache/tenants/acme", "admin"),
    ],
)
def test_scopes(client: Client, method: str, path: str, needs: str) -> None:
    lacking = client.as_("user" if needs == "cache" else "owner")
    arguments = ({"pin": 60},) if method == "post" else ()
    assert getattr(lacking, method)(path, *arguments, status=403)["code"] == "scope_missing"
    assert client.http.request(method, path, json={}).status_code == 401


def test_an_answer_explains_itself_and_the_log_keeps_it(client: Client) -> None:
    answer = ask(client, part(1, "doc:1"), "who ?", cache={"explain": True})
    record = client.get(f"/v1/cache/requests/{answer['id']}")
    assert record["cache"] == answer["cache"]
    details = answer["usage"]["prompt_tokens_details"]
    listed = {kind: answer["cache"]["other"].get(kind, 0) for kind in TOKEN_KINDS}
    for segment in answer["cache"]["segments"]:
        for kind, count in segment["tokens"].items():
            listed[kind] += count
    names = ("cached_tokens", "fused_tokens", "recomputed_tokens", "prefilled_tokens")
    assert listed == dict(zip(TOKEN_KINDS, (details[name] for name in names), strict=True))
    assert client.get(f"/v1/cache/requests/{record['request_id']}") == record
    missing = client.as_("other").get(f"/v1/cache/requests/{answer['id']}", status=404)
    assert missing["code"] == "request_not_found"


def test_two_requests_are_compared(client: Client) -> None:
    a = ask(client, part(1, "doc:1"), part(2, "doc:2"), "who ?")
    b = ask(client, part(1, "doc:1"), part(3, "doc:3"), "who ?")
    told = client.get(f"/v1/cache/requests/{b['id']}", compare=a["id"])
    assert told["diverged"]["segment"] == "doc:3"
    assert told["diverged"]["reason"] == "messages_changed"
    assert (told["request"]["id"], told["compared_with"]["id"]) == (b["id"], a["id"])
    assert told["request"]["cache"]["prefix"]["diverged"]["segment"] == "doc:3"


def test_warming_the_prefix_makes_the_next_request_a_hit_and_is_idempotent(client: Client) -> None:
    body = chat(part(1, "doc:1"), "who ?")
    first = client.as_("user").post("/v1/cache/warm", body)
    assert first["computed_tokens"] == first["prompt_tokens"]
    assert first["segments"][0]["tiers"]["device"]["tokens"] == 96
    assert client.post("/v1/cache/warm", body)["computed_tokens"] == 1  # the last token of a prompt always is
    usage = client.post("/v1/chat/completions", body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_warming_chunks_lets_documents_be_fused_in_any_order(client: Client) -> None:
    body = chat(part(1, "doc:1"), part(2), "who ?", what="chunks")
    warmed = client.post("/v1/cache/warm", body)
    assert warmed["computed_tokens"] == 2 * 96
    assert [(list(s["tiers"]), s["tiers"]["host"]["tokens"]) for s in warmed["segments"]] == [(["host"], 96)] * 2
    assert client.post("/v1/cache/warm", body)["computed_tokens"] == 0
    answer = ask(client, part(2), part(1, "doc:1"), "who ?", cache={"reuse": "fused", "explain": True})
    details = answer["usage"]["prompt_tokens_details"]
    assert details["fused_tokens"] + details["recomputed_tokens"] == 96
    assert details["cached_tokens"] >= 96  # the first one stands where it was computed
    assert {s["tier"] for s in answer["cache"]["segments"]} == {"host"}


def test_warmed_chunks_expire_and_warmed_prefixes_too(client: Client) -> None:
    body = chat(part(1, "doc:1"), "who ?", what=["prefix", "chunks"], cache={"ttl": 1})
    warmed = client.post("/v1/cache/warm", body)
    assert warmed["segments"][0]["expires_at"] == pytest.approx(time.time() + 1, abs=0.9)
    assert set(warmed["segments"][0]["tiers"]) == {"device", "host"}
    time.sleep(1.1)
    assert client.get("/v1/cache/segments/doc:1")["tiers"] == {}


def test_what_is_checked(client: Client) -> None:
    for what in ("everything", [], 3, None):
        assert client.post("/v1/cache/warm", chat("hi", what=what), status=400)["param"] == "what"


def test_an_estimate_is_what_the_request_then_gets(client: Client, state: ServerState) -> None:
    def estimated(body: Body) -> Any:
        before = (state.llm.engine.parts.chunks.store.stats(), state.llm.engine.counters.tokens.copy())
        told = client.as_("user").post("/v1/cache/estimate", body)
        assert (state.llm.engine.parts.chunks.store.stats(), state.llm.engine.counters.tokens) == before
        return told

    client.post("/v1/cache/warm", chat(part(1), part(2), "who ?", what="chunks"))
    bodies = [
        chat(part(2), part(1), part(3), "who ?", cache={"reuse": "fused"}),
        chat(part(2), part(1), part(3), "where ?", cache={"reuse": "exact"}),
        chat(part(2), part(1), part(3), "when ?"),
        chat(part(2), part(1), part(3), "why ?", cache={"reuse": "off"}),
    ]
    for body in bodies:
        told = estimated(body)
        details = client.post("/v1/chat/completions", body)["usage"]["prompt_tokens_details"]
        assert told["exact_tokens"] == details["cached_tokens"]
        assert told["reusable_tokens"] == details["fused_tokens"] + details["recomputed_tokens"]
        assert told["prefilled_tokens"] == details["prefilled_tokens"]
        assert told["slots_needed"] == told["prompt_tokens"] + 1  # the last of two answer tokens has no slot
    assert told["would_run"] == "off"


def test_pages_of_segments(client: Client) -> None:
    ask(client, *(part(i, f"doc:{i}", n=20) for i in range(5)), part(9, "else"))
    first = client.get("/v1/cache/segments", prefix="doc:", limit=3)
    second = client.get("/v1/cache/segments", prefix="doc:", limit=3, after=first["data"][-1]["id"])
    assert [s["id"] for s in (*first["data"], *second["data"])] == [f"doc:{i}" for i in range(5)]
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert client.as_("other").get("/v1/cache/segments")["data"] == []
    assert client.get("/v1/cache/segments", cache_salt="x")["data"] == []
    assert client.get("/v1/cache/segments", limit=0, status=400)["param"] == "limit"


def test_pinning_and_its_quota(client: Client, state: ServerState) -> None:
    ask(client, part(1, "doc:1"))
    pinned = client.post("/v1/cache/segments/doc:1/pin", {"pin": "1h"})
    assert pinned["pinned_until"] == pytest.approx(time.time() + 3600, abs=60)
    assert client.delete("/v1/cache/segments/doc:1/pin")["pinned_until"] is None
    assert client.post("/v1/cache/segments/doc:2/pin", {"pin": "1h"}, status=404)["code"] == "segment_not_found"
    for body in ({}, {"pin": "soon"}, {"pin": 0}, {"pin": True}, {"ttl": "1h"}):
        assert client.post("/v1/cache/segments/doc:1/pin", body, status=400)["code"]
    long = part(2, "long", n=8000, pin="1h")
    assert 8000 * state.llm.engine.parts.pool.layout.bytes_per_token > 2**20
    assert client.post("/v1/cache/warm", chat(long), status=409)["code"] == "pin_quota_exceeded"


def test_a_pin_in_a_mark_protects(client: Client) -> None:
    before = time.time()
    ask(client, part(1, "doc:1", pin="10m"))
    assert client.get("/v1/cache/segments/doc:1")["pinned_until"] >= before + 600


def test_deleting_a_segment(client: Client) -> None:
    client.post("/v1/cache/warm", chat(part(1, "doc:1"), what="chunks"))
    assert client.as_("other").delete("/v1/cache/segments/doc:1", status=404)
    assert client.delete("/v1/cache/segments/doc:1")["records"] == 2
    assert client.get("/v1/cache/segments/doc:1", status=404)["code"] == "segment_not_found"


def test_erasing_a_tenant_takes_everything_and_only_his(client: Client, state: ServerState) -> None:
    body = chat(part(1, "doc:1"), "who ?", what=["prefix", "chunks"])
    for key in ("owner", "other"):
        client.as_(key).post("/v1/cache/warm", body)
        client.as_(key).post("/v1/chat/completions", chat(part(1, "doc:1"), "who ?"))
    receipt = client.as_("admin").delete("/v1/cache/tenants/acme")
    assert receipt["tiers"]["host"]["records"] == 2
    assert receipt["tiers"]["host"]["state"] == "deleted"
    assert (receipt["tenant"], receipt["pending"]) == ("acme", [])
    assert (receipt["index_entries"], receipt["request_records"]) == (1, 2)
    assert receipt["digest"] == digest_of(receipt)
    assert client.get("/v1/cache/segments")["data"] == []
    for key, found in (("owner", 0), ("other", 1)):
        usage = client.as_(key).post("/v1/chat/completions", chat(part(1, "doc:1"), "who ?"))["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == found * (usage["prompt_tokens"] - 1)
    again = client.as_("admin").delete("/v1/cache/tenants/acme", in_flight="abort")
    assert again["tiers"]["host"]["records"] == 0
    assert again["receipt_id"] != receipt["receipt_id"]


def test_a_running_request_keeps_its_tenant_from_being_erased(client: Client, state: ServerState) -> None:
    answers: list[Any] = []
    body = chat("tell me a long story", max_tokens=6000, ignore_eos=True)

    def run() -> None:
        answers.append(client.http.post("/v1/chat/completions", json=body, headers=client.headers))

    running = threading.Thread(target=run)
    running.start()
    while not state.loop.running:
        assert running.is_alive()
        time.sleep(0.01)
    admin = client.as_("admin")
    assert admin.delete("/v1/cache/tenants/acme", status=409)["code"] == "tenant_busy"
    assert admin.delete("/v1/cache/tenants/rival")["request_records"] == 0
    admin.delete("/v1/cache/tenants/acme", in_flight="abort")
    running.join(30)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "request_aborted"
    state.loop.call(lambda engine: engine.check_integrity())


def test_stats(client: Client) -> None:
    ask(client, part(1, "doc:1"), "who ?")
    ask(client.as_("other"), part(2), "who ?")
    own = client.get("/v1/cache/stats")
    assert own["requests"]["count"] == 1
    assert own["requests"]["tokens"]["prefilled"] == own["recent"][0]["prompt_tokens"]
    assert own["segments"] == {"count": 1, "pinned": 0}
    assert "server" not in own
    everything = client.as_("admin").get("/v1/cache/stats")
    assert everything["requests"]["count"] == 0
    assert sum(one["count"] for one in everything["server"]["requests"]) == 2
    assert everything["server"]["tiers"]["host"]["up"] is True
