"""Load generation: what is asked, how it is timed, and what the numbers say."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.bench.client import Row, Target, Unreachable, describe
from kvweave.bench.report import render
from kvweave.bench.runner import Load, Run, run
from kvweave.bench.summary import percentile, summarise
from kvweave.bench.workloads import WORKLOADS, Shape, Texts, make_calls, read_trace
from kvweave.cli import main
from kvweave.errors import DocumentError, InvalidOption
from tests.bench.fake import Fake, serving

SHAPE = Shape(documents=4, tokens=40, pool=12)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_follow_from_their_seed(name: str) -> None:
    texts = Texts(SHAPE)
    calls = make_calls(name, 6, SHAPE, texts)
    assert calls == make_calls(name, 6, SHAPE, texts)
    assert len(calls) == 6
    assert name == "repeat" or calls != make_calls(name, 6, Shape(4, 40, 12, seed=1), Texts(Shape(4, 40, 12, seed=1)))


def test_what_repeats_is_what_the_workload_says() -> None:
    texts = Texts(SHAPE)
    fresh, repeat, permuted, dropped, trace = (
        make_calls(name, 8, SHAPE, texts) for name in ("fresh", "repeat", "permuted", "dropped", "trace")
    )
    assert len({d for call in fresh for d in call.documents}) == 32
    assert len({(call.documents, call.question) for call in repeat}) == 1
    assert len({frozenset(call.documents) for call in permuted}) == 1
    assert all(a.documents != b.documents for a, b in itertools.pairwise(permuted))
    assert len({d for call in dropped for d in call.documents}) == 5
    assert {len(call.documents) for call in dropped} == {4}
    assert len({call.documents for call in trace}) == 8
    chat = make_calls("chat", 4, SHAPE, texts)
    for before, after in itertools.pairwise(chat):
        assert after.history[: len(before.history)] == before.history
    assert [call.after for call in chat] == [None, 0, 1, 2]


def test_a_trace_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('[0, 3]\n{"documents": [2]}\n')
    calls = make_calls("trace", 3, SHAPE, Texts(SHAPE), read_trace(path))
    assert [[label for label, _ in call.documents] for call in calls] == [["doc:0", "doc:3"], ["doc:2"], ["doc:0", "doc:3"]]
    path.write_text('[0]\n["a"]\n')
    with pytest.raises(DocumentError, match="line 2"):
        read_trace(path)


def test_every_request_is_sent_and_timed_and_no_more_at_a_time_than_asked() -> None:
    fake = Fake()
    calls = make_calls("permuted", 12, SHAPE, Texts(SHAPE))
    with serving(fake.app) as url:
        target = Target(url, "fake", output_tokens=5, body={"top_k": 1})
        done = asyncio.run(run(target, calls, Load(concurrency=3), warm_up=calls[:1]))
    assert len(fake.bodies) == 13
    assert fake.most_running == 3
    assert {body["top_k"] for body in fake.bodies} == {1}
    assert [row.index for row in done.rows] == list(range(12))
    for row in done.rows:
        assert row.error is None
        assert row.ttft is not None
        assert row.tpot is not None
        assert 0 < row.ttft < row.total
        assert (row.output_tokens, row.prompt_tokens, len(row.chunks)) == (5, 10, 5)
    summary = summarise(done)
    assert summary["usage"] == {"cached_tokens": 36, "fused_tokens": 48}
    assert summary["output_tokens"] == 60


def test_documents_are_marked_parts_only_for_those_who_know_them() -> None:
    (call,) = make_calls("repeat", 1, SHAPE, Texts(SHAPE))
    plain = Target("http://x", "m").request(call)["messages"][-1]["content"]
    marked = Target("http://x", "m", parts=True).request(call)["messages"][-1]["content"]
    assert plain == "\n".join(part["text"] for part in marked)
    assert [part["cache"]["segment"] for part in marked[:-1]] == [label for label, _ in call.documents]


def test_failures_are_counted_not_timed() -> None:
    fake = Fake(fail=2)
    calls = make_calls("fresh", 6, SHAPE, Texts(SHAPE))
    with serving(fake.app) as url:
        done = asyncio.run(run(Target(url, "fake", output_tokens=2), calls, Load()))
    summary = summarise(done)
    assert summary["errors"] == {"HTTP 503 overloaded": 3}
    assert sum(row.ttft is not None for row in done.rows) == 3
    with pytest.raises(Unreachable, match="running"):
        asyncio.run(describe("http://127.0.0.1:9", None))


def test_a_conversation_waits_for_its_answers() -> None:
    fake = Fake()
    calls = make_calls("chat", 4, SHAPE, Texts(SHAPE))
    with serving(fake.app) as url:
        asyncio.run(run(Target(url, "fake", output_tokens=3), calls, Load(concurrency=4)))
    assert fake.most_running == 1


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_a_decay_shows_in_the_quarters() -> None:
    rows = tuple(Row(i, start=float(i), ttft=0.1 * (1 + i // 2), total=1.0, chunks=(0.1,)) for i in range(8))
    quarters = summarise(Run(rows, 8.0, None))["ttft_ms_by_quarter"]
    assert quarters == pytest.approx([100.0, 200.0, 300.0, 400.0])
    assert statistics.fmean(quarters) == pytest.approx(250.0)


def test_the_command_prints_json_last_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, save = tmp_path / "report.html", tmp_path / "rows.jsonl"
    fake = Fake(kvweave=True)
    options: list[Any] = ["--requests", 4, "--output-tokens", 3, "--document-tokens", 40, "--html", html, "--save", save]
    with serving(fake.app) as url:
        code = main([str(a) for a in ["bench", "serve", "--url", url, *options]])
    assert code == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["requests"] == 4
    assert summary["segments"] == "parts"
    assert summary["ttft_ms"]["p50"] > 0
    assert summary["server_cpu_seconds"] is not None, "it runs in this process"
    page = html.read_text()
    assert page.count("<svg") >= 2
    assert "http" not in page.replace("http://127.0.0.1", ""), "nothing is fetched"
    assert len(save.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "permutd"], "permuted"),
        (["--body", "{"], "JSON"),
        (["--segments", "x"], "auto"),
        (["--request-rate", "0"], "above 0"),
    ],
)
def test_wrong_options_are_told_before_anything_is_sent(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_markup_in_names_stays_text() -> None:
    page = render("<script>", summarise(Run((Row(0, 0.0, 0.1, 1.0, (0.1,)),), 1.0, None)), [])
    assert "<script>" not in page
    with pytest.raises(InvalidOption):
        make_calls("<b>", 1, SHAPE, Texts(SHAPE))
