"""Runs against a made-up server: what is sent, what is counted, and what a failure is told as."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvweave.bench.run import Options, Result, make_workload, run
from kvweave.bench.server_cpu import find_server
from kvweave.bench.streaming import BROKEN, NO_ANSWER, TIMED_OUT, UNREACHED, Exchange, exchange
from kvweave.bench.target import base_of
from kvweave.bench.workloads import Shape
from kvweave.errors import InvalidOption, KvweaveError, Unavailable
from tests.bench.fake import DETAILS, PROMPT_TOKENS, Fake, serving

NOBODY = "http://127.0.0.1:9"


def measure(fake: Fake, shape: Shape | None = None, **options: Any) -> Result:
    with serving(fake.app) as url:
        asked = Options(url, shape or Shape(8, 2), **{"document_tokens": 20, "output_tokens": 4, **options})
        return run(asked, make_workload(asked))


def post(fake: Fake, timeout: float = 10.0) -> Exchange:
    async def send(url: str) -> Exchange:
        async with httpx.AsyncClient(timeout=timeout) as client:
            return await exchange(client, f"{url}/v1/chat/completions", {"max_tokens": 3})

    with serving(fake.app) as url:
        return asyncio.run(send(url))


# --- one exchange -----------------------------------------------------------------------------------------------------


def test_an_exchange_has_a_gap_between_tokens_alone() -> None:
    """The chunks with a role and with a finish reason hold no token."""
    done = post(Fake())
    assert (done.error, done.text, done.finish_reason) == (None, "w0 w1 w2 ", "length")
    assert (done.prompt_tokens, done.output_tokens, done.details) == (PROMPT_TOKENS, 3, DETAILS)
    assert len(done.gaps_s) == 2
    assert done.ttft_s is not None
    assert done.tpot_s is not None
    assert 0 < done.ttft_s < done.e2e_s
    assert done.tpot_s == pytest.approx((done.e2e_s - done.ttft_s) / 2)


@pytest.mark.parametrize(
    ("breaks", "code"),
    [("nonsense", BROKEN), ('{"error": {"message": "Gone.", "code": "internal_error"}}', "internal_error")],
)
def test_a_stream_that_fails_has_no_times(breaks: str, code: str) -> None:
    done = post(Fake(breaks=breaks))
    assert (done.error, done.ttft_s, done.output_tokens) == (code, None, 0)


def test_a_server_that_is_silent_refuses_or_is_not_there() -> None:
    assert post(Fake(pause_s=30), timeout=0.2).error == TIMED_OUT
    refused = post(Fake(fail=1))
    assert (refused.error, refused.message) == ("overloaded", "Busy.")

    async def send() -> Exchange:
        async with httpx.AsyncClient() as client:
            return await exchange(client, NOBODY, {})

    assert asyncio.run(send()).error == UNREACHED


def test_an_empty_stream_is_no_answer() -> None:
    async def empty(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def ask(url: str) -> Exchange:
        async with httpx.AsyncClient() as client:
            return await exchange(client, url, {})

    with serving(empty) as url:
        assert asyncio.run(ask(url)).error == NO_ANSWER


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3])
def test_every_request_is_sent_once_and_no_more_at_a_time_than_asked(concurrency: int) -> None:
    fake = Fake()
    result = measure(fake, Shape(12, 2), workload="permuted", concurrency=concurrency, body={"top_k": 1})
    assert len(fake.bodies) == 12 + 1 + 1, "a warm-up and a primed prompt come first and aren't counted"
    assert fake.most_running == concurrency
    assert {body["top_k"] for body in fake.bodies} == {1}
    summary = result.summary
    assert (summary.requests, summary.completed, summary.errors) == (12, 12, {})
    assert summary.usage == {name: 12 * count for name, count in DETAILS.items()}
    assert (summary.prompt_tokens, summary.output_tokens) == (12 * PROMPT_TOKENS, 48)
    rows = list(result.rows())
    assert [row["sent_s"] for row in rows] == sorted(row["sent_s"] for row in rows)
    assert rows[0]["sent_s"] == 0


def test_arrivals_do_not_wait_for_answers() -> None:
    fake = Fake(pause_s=0.05)
    result = measure(fake, Shape(10, 1), workload="fresh", rate=500.0)
    assert result.summary.completed == 10
    assert fake.most_running > 3


def test_a_conversation_carries_the_servers_own_answers() -> None:
    fake = Fake()
    measure(fake, Shape(6, 2, turns=3), workload="chat")
    turns = [body["messages"] for body in fake.bodies[1:]]
    assert [len(messages) for messages in turns] == [1, 3, 5, 1, 3, 5]
    for before, after in itertools.pairwise(turns[:3]):
        assert after[: len(before)] == before
        assert after[len(before)] == {"role": "assistant", "content": "w0 w1 w2 w3 "}


def test_a_conversation_ends_at_its_first_error() -> None:
    result = measure(Fake(fail=3), Shape(8, 1, turns=4), workload="chat")
    assert result.summary.errors == {"overloaded": 2}
    assert result.summary.requests < 8


def test_documents_are_marked_only_for_a_server_that_knows_marks() -> None:
    plain, marked, forced = Fake(), Fake(kvweave=True), Fake(kvweave=True)
    for fake, segments in ((plain, "auto"), (marked, "auto"), (forced, "text")):
        measure(fake, Shape(1, 2), segments=segments)
    text, parts = plain.bodies[-1]["messages"][0]["content"], marked.bodies[-1]["messages"][0]["content"]
    assert ["cache" in part for part in parts] == [True, True, False]
    assert "\n".join(part["text"] for part in parts) == text == forced.bodies[-1]["messages"][0]["content"]


def test_every_document_is_precomputed_once_and_its_cost_told() -> None:
    fake = Fake(kvweave=True)
    result = measure(fake, Shape(5, 3), workload="permuted", precompute=True, body={"cache_salt": "s"})
    texts = [body["messages"][0]["content"][0]["text"] for body in fake.warmed]
    assert len(set(texts)) == len(texts) == 6, "three of the warm-up, three of the workload"
    assert {(body["what"], body["cache_salt"]) for body in fake.warmed} == {("chunks", "s")}
    assert set(texts) >= {part["text"] for part in fake.bodies[-1]["messages"][0]["content"][:-1]}
    assert result.precomputed is not None
    assert (result.precomputed.documents, result.precomputed.seconds > 0) == (6, True)
    with pytest.raises(InvalidOption, match="needs a kvweave server"):
        measure(Fake(), precompute=True)
    with pytest.raises(KvweaveError, match=r"warm fails: .*404"):
        measure(Fake(), precompute=True, segments="parts")


@pytest.mark.parametrize("reuse", ["fused", "exact"])
@pytest.mark.parametrize("fused", [0, 4])
def test_fused_kv_that_was_asked_for_and_never_came(reuse: str, fused: int) -> None:
    result = measure(Fake(details={"fused_tokens": fused}), Shape(1, 1), body={"cache": {"reuse": reuse}})
    assert result.asked_in_vain == (reuse == "fused" and not fused)


def test_a_server_that_refuses_ignore_eos_is_asked_without() -> None:
    fake = Fake(refuses="ignore_eos")
    result = measure(fake, Shape(2, 1))
    assert result.summary.completed == 2
    assert not result.as_json()["ignore_eos"]
    assert ["ignore_eos" in body for body in fake.bodies] == [True, False, False, False]


def test_failures_are_counted_not_timed() -> None:
    summary = measure(Fake(fail=2), Shape(6, 1), workload="fresh").summary
    assert summary.errors == {"overloaded": 3}
    assert summary.completed == 3
    assert summary.output_tokens == 12


def test_a_refused_warm_up_ends_the_run() -> None:
    with pytest.raises(KvweaveError, match=r"warm-up \(unknown\): Unknown field stream"):
        measure(Fake(refuses="stream"))


def test_a_key_is_sent_and_a_wrong_one_told() -> None:
    assert measure(Fake(key="k1"), Shape(1, 1), api_key="k1").summary.completed == 1
    with pytest.raises(KvweaveError, match=r"HTTP 401.*--api-key"):
        measure(Fake(key="k1"), api_key="k2")


def test_a_model_that_is_not_served_and_a_server_that_is_not_there() -> None:
    assert measure(Fake(), Shape(1, 1), model="other").target.model == "other"
    with pytest.raises(InvalidOption, match="Did you mean 'fake'"):
        measure(Fake(), model="fak")
    options = Options(NOBODY, Shape(1, 1))
    with pytest.raises(Unavailable, match="No server answers at http"):
        run(options, make_workload(options))


# --- CPU time ---------------------------------------------------------------------------------------------------------


def test_the_server_is_found_by_its_port() -> None:
    with serving(Fake().app) as url:
        cpu = find_server(url)
        assert cpu is not None
        before = cpu()
        sum(range(3_000_000))  # this process is the server
        assert cpu() > before
    assert find_server(NOBODY) is None
    assert find_server("http://example.com") is None


@pytest.mark.parametrize("concurrency", [1, 2])
def test_cpu_to_the_first_token_is_known_where_nothing_else_runs(concurrency: int) -> None:
    summary = measure(Fake(), Shape(4, 1), concurrency=concurrency).summary
    assert summary.server_cpu_seconds is not None
    assert (summary.cpu_seconds_to_first_token is None) == (concurrency > 1)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"rate": 0.0}, "--request-rate is 0.0"),
        ({"rate": float("nan")}, "--request-rate is nan"),
        ({"rate": 1.0, "concurrency": 2}, "exclude each other"),
        ({"segments": "all"}, "auto, parts, text"),
        ({"warm_up": 0}, "--warm-up is 0"),
        ({"trace": "x"}, "--docs"),
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        replace(Options(NOBODY, Shape(1, 1)), **changes)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/chat/completions", "http://h:1"),
        ("https://h/api/v1/", "https://h/api"),
        ("h:8000", "http://h:8000"),
    ],
)
def test_urls_are_taken_as_people_write_them(url: str, base: str) -> None:
    assert base_of(url) == base


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidOption, match="no HTTP URL"):
        base_of(url)
