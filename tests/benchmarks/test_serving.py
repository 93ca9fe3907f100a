"""The comparison of servers, on made-up ones: what each peer is asked, how it is started and stopped, and the table."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from benchmarks.serving import __main__ as serving_benchmark
from benchmarks.serving.measure import Plan, measure, read_retrieval, speed_ups
from benchmarks.serving.peers import NAMES, PORT, NotStarted, Peer, Setup, make_peers, running
from kvweave.bench.workloads import TRACE
from tests.bench.fake import DETAILS, Fake, serving

ROOT = Path(__file__).parents[2]
PLAN = Plan(("fresh", "permuted"), (1, 2), requests=3, documents=2, document_tokens=10, output_tokens=2, queries=4)
SETUP = Setup(Path("model"), threads=2, context=512, users=4)


def make_app() -> FastAPI:
    """Run by uvicorn in a process of its own."""
    app = Fake().app
    app.get("/health")(lambda: {})
    return app


def uvicorn(name: str, **more: Any) -> Peer:
    app = ("--factory", "tests.benchmarks.test_serving:make_app", "--app-dir", str(ROOT))
    return Peer(name, (sys.executable, "-m", "uvicorn", *app, "--port", PORT), **more)


def test_a_peer_runs_until_it_is_no_longer_needed(tmp_path: Path) -> None:
    with running(uvicorn("fake"), tmp_path / "log", 60) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert "startup complete" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((sys.executable, "-c", "raise SystemExit('no such model')"), "exit code 1: no such model"),
        (("/nowhere/server",), "No such file"),
        (
            (sys.executable, "-c", "print('loading', flush=True); import time; time.sleep(60)"),
            "not ready after 2 s: loading",
        ),
    ],
)
def test_a_peer_that_does_not_come_up_says_why(command: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(NotStarted, match=message), running(Peer("x", command), tmp_path / "log", 2):
        pass


def test_every_peer_gets_the_same_texts_and_no_row_those_of_another() -> None:
    asked = []
    for body in ({}, {"top_k": 1}):
        fake, rows = Fake(), list[Any]()
        with serving(fake.app) as url:
            measure(Peer("fake", (), body=body), url, PLAN, rows.append)
        assert not any(row["precomputed"] for row in rows)
        asked.append([request["messages"] for request in fake.bodies])
        assert [(row["workload"], row["concurrency"]) for row in rows] == [
            *((workload, concurrency) for workload in PLAN.workloads for concurrency in PLAN.concurrency),
            (TRACE, 1),
        ]
        assert all(request.get("top_k") == body.get("top_k") for request in fake.bodies)
        assert rows[0]["usage"] == {name: 3 * count for name, count in DETAILS.items()}
        assert rows[0]["ttft_ms"] > 0
    assert sorted(map(str, asked[0])) == sorted(map(str, asked[1]))
    assert len({str(messages) for messages in asked[0]}) == len(asked[0])


def test_only_documents_that_a_workload_knows_are_computed_ahead() -> None:
    fake, rows = Fake(kvweave=True), list[Any]()
    with serving(fake.app) as url:
        measure(Peer("fake", (), precompute=True), url, PLAN, rows.append)
    ahead = {row["workload"]: bool(row["precomputed"]) for row in rows}
    assert ahead == {"fresh": False, "permuted": True, TRACE: True}


def test_there_are_as_many_conversations_as_users() -> None:
    fake = Fake()
    with serving(fake.app) as url:
        measure(Peer("fake", ()), url, replace(PLAN, workloads=("chat",), concurrency=(3,), queries=0), lambda row: None)
    assert fake.most_running == 3


def test_absent_peers_are_named_and_a_failing_one_keeps_nobody_from_running(tmp_path: Path) -> None:
    peers: dict[str, Peer | str] = {
        "broken": Peer("broken", (sys.executable, "-c", "")),
        "absent": "not given",
        "fake": uvicorn("fake"),
    }
    told: list[str] = []
    found, skipped = serving_benchmark.compare(peers, PLAN, tmp_path, 60, told.append)
    assert {row["peer"] for row in found} == {"fake"}
    assert len(found) == 5
    assert skipped == {"absent": "not given", "broken": "exit code 0: "}
    assert len(told) == 7


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_benchmark, "make_peers", lambda setup: {"kvweave": uvicorn("kvweave"), "vllm": "absent"})
    out = io.StringIO()
    sizes = ("--requests", "2", "--documents", "2", "--document-tokens", "10", "--output-tokens", "2", "--queries", "0")
    with contextlib.redirect_stdout(out):
        code = serving_benchmark.main(["--model", "x", "--workloads", "fresh", "--concurrency", "1", *sizes])
    *rows, result = (json.loads(line) for line in out.getvalue().splitlines())
    assert code == 0
    assert rows == result["rows"]
    assert [row["workload"] for row in result["rows"]] == ["fresh"]
    assert result["skipped"] == {"vllm": "absent"}


def test_commands_of_the_peers() -> None:
    bare = make_peers(SETUP)
    assert tuple(bare) == NAMES
    assert [isinstance(peer, str) for peer in bare.values()] == [False, False, True, True]
    given = Setup(Path("m"), 2, 512, 4, "epic", Path("python"), Path("server"), Path("m.gguf"))
    for name, peer in make_peers(given).items():
        assert isinstance(peer, Peer)
        assert peer.name == name
        assert peer.command.count(PORT) == 1
        assert ("--gate" in peer.command) == bool(peer.body) == peer.precompute == (name == "kvweave-fused")
        if peer.body:
            assert peer.body == {"cache": {"reuse": "fused", "technique": "epic"}}
    (llama,) = [peer for peer in make_peers(given).values() if isinstance(peer, Peer) and peer.name == "llamacpp"]
    assert llama.command[llama.command.index("--ctx-size") + 1] == "2048", "a slot holds a whole prompt"


def test_speed_up_is_the_baselines_time_over_the_peers() -> None:
    quarters = {"kvweave": [100.0, 0.0, 0.0, 90.0], "kvweave-fused": [50.0, 0.0, 0.0, 30.0], "short": []}
    found = [{"peer": peer, "workload": TRACE, "ttft_ms_by_quarter": times} for peer, times in quarters.items()]
    assert speed_ups(found, "kvweave") == {"kvweave-fused": {"first_quarter": 2.0, "last_quarter": 3.0}}
    assert speed_ups(found, "absent") == {}


def test_equal_texts_of_a_retrieval_are_one_document(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = [{"retrieved_docs": ["a", "b"]}, {"retrieved_docs": ["b"], "question": "Why?"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = read_retrieval(path)
    assert first.documents[1] == second.documents[0]
    assert (first.question, second.question) == (None, "Why?")
