"""Chat and completions over a real server: streams to the letter, many at a time, clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.live import Live, live_server, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def live(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(tiny_model_dir, tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture(autouse=True)
def _whole(live: Live) -> Iterator[None]:
    yield
    wait_until(live.idle)
    live.check()


def events(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks of a stream, whose end is checked."""
    response = live.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def test_one_chunk_a_token_and_nothing_else(live: Live) -> None:
    chunks = events(live, CHAT, HELLO)
    assert len(chunks) == 6
    assert [c["choices"][0]["delta"].get("role") for c in chunks] == ["assistant"] + [None] * 5
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 5 + ["length"]
    assert not any("usage" in c for c in chunks)
    assert len({c["id"] for c in chunks}) == 1
    assert text_of(chunks) == live.post(CHAT, HELLO).json()["choices"][0]["message"]["content"]


def test_usage_comes_last_and_is_that_of_the_whole_answer(live: Live) -> None:
    body = {**HELLO, "messages": [{"role": "user", "content": "usage, once asked and once streamed"}]}
    live.post(CHAT, body)
    whole = live.post(CHAT, body).json()
    for option in ({"stream_options": {"include_usage": True}}, {"cache": {"reuse": "exact"}}, {"cache": {"timings": True}}):
        *chunks, last = events(live, CHAT, {**body, **option})
        assert len(chunks) == 6
        assert last["choices"] == []
        assert not any("usage" in c for c in chunks)
        ops = last["usage"]["prompt_tokens_details"].pop("cache_ops")
        assert ops == ("cache" in option)
        assert last["usage"] == {**whole["usage"], "prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
        assert whole["usage"]["prompt_tokens_details"].items() >= last["usage"]["prompt_tokens_details"].items()
        assert ("timings" in last) == (option.get("cache") == {"timings": True})
    chunks = events(live, CHAT, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 5, 6, 6]


def test_a_request_that_computes_nothing_but_its_prompt(live: Live) -> None:
    whole = live.post(CHAT, {**HELLO, "max_tokens": 0}).json()
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["choices"][0]["finish_reason"] == "length"
    (chunk,) = events(live, CHAT, {**HELLO, "max_tokens": 0})
    assert chunk["choices"][0]["finish_reason"] == "length"


def test_what_is_wrong_is_told_before_the_stream_begins(live: Live) -> None:
    response = live.post(CHAT, {**HELLO, "stream": True, "temperature": 1000})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")
    long = {**HELLO, "messages": [{"role": "user", "content": "x" * 9000}], "stream": True}
    assert live.post(CHAT, long).json()["error"]["code"] == "context_length_exceeded"


def test_what_goes_wrong_later_is_one_event(live: Live) -> None:
    body = {**HELLO, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", live.url + CHAT, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        live.state.loop.call(lambda engine: [engine.abort(s, "a test wants it") for s in list(engine.scheduler.running)])
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "request_aborted"
    assert not any("error" in line for line in rest[:-2] if '"choices"' not in line)


def test_several_samples_share_a_prompt(live: Live) -> None:
    body = {**HELLO, "n": 3, "temperature": 1.0, "seed": 7}
    whole = live.post(CHAT, body).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 18
    pieces = [c["choices"][0] for c in events(live, CHAT, body)]
    for choice in whole["choices"]:
        own = [p for p in pieces if p["index"] == choice["index"]]
        assert "".join(p["delta"]["content"] for p in own) == choice["message"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


def test_completions_of_texts_ids_and_lists(live: Live) -> None:
    ids = live.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
    body = {"max_tokens": 4, "temperature": 0}
    single = live.post(COMPLETIONS, {**body, "prompt": "hello"}).json()["choices"][0]["text"]
    assert live.post(COMPLETIONS, {**body, "prompt": ids}).json()["choices"][0]["text"] == single
    several = live.post(COMPLETIONS, {**body, "prompt": ["hello", "other"], "n": 2}).json()
    assert [c["index"] for c in several["choices"]] == [0, 1, 2, 3]
    assert several["choices"][0]["text"] == several["choices"][1]["text"] == single
    assert several["usage"]["prompt_tokens"] == 10 + 2 * (len(ids) - 5)
    assert live.post(COMPLETIONS, {**body, "prompt": [10**6]}).json()["error"]["code"] == "invalid_request"
    chunks = events(live, COMPLETIONS, {**body, "prompt": ["hello", "other"]})
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == 0) == single


def test_echo_tells_the_log_probabilities_of_the_prompt(live: Live) -> None:
    body = {"prompt": "hello", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}
    first, second = (live.post(COMPLETIONS, body).json() for _ in range(2))
    choice = first["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("hello")
    assert len(logprobs["tokens"]) == first["usage"]["total_tokens"]
    assert logprobs["token_logprobs"][0] is None
    for token, value, top in zip(*(logprobs[k][1:] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == value  # the same floats: clients compare with ==
    assert second["choices"][0]["logprobs"] == logprobs
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # all logits are needed


def test_stop_strings_never_show(live: Live) -> None:
    text = live.post(CHAT, HELLO).json()["choices"][0]["message"]["content"]
    stop = text[2:4]
    body = {**HELLO, "stop": stop}
    assert live.post(CHAT, body).json()["choices"][0]["message"]["content"] == text[: text.index(stop)]
    chunks = events(live, CHAT, body)
    assert text_of(chunks) == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_fifty_at_a_time_answer_as_they_would_alone(live: Live) -> None:
    client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=120)

    async def ask(i: int, stream: bool) -> str:
        messages: Any = [{"role": "user", "content": f"question {i}: {'why ' * (i % 17)}"}]
        options: Any = {"model": "tiny", "messages": messages, "max_tokens": 5 + i % 7, "temperature": 0}
        if not stream:
            return (await client.chat.completions.create(**options)).choices[0].message.content or ""
        chunks = [c async for c in await client.chat.completions.create(**options, stream=True)]
        return "".join(c.choices[0].delta.content or "" for c in chunks)

    async def both() -> tuple[list[str], list[str]]:
        together = await asyncio.gather(*(ask(i, stream=bool(i % 2)) for i in range(50)))
        return together, [await ask(i, stream=False) for i in range(50)]

    together, alone = asyncio.run(both())
    assert together == alone
    assert len(set(alone)) > 25  # a control: the answers differ


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_client_that_goes_away_leaves_nothing_behind(live: Live, stream: bool, samples: int) -> None:
    before = live.free_slots()
    body = {**HELLO, "max_tokens": 4000, "ignore_eos": True, "stream": stream, "n": samples}
    with httpx.Client() as client:
        try:
            with client.stream("POST", live.url + CHAT, json=body, timeout=1.5) as response:
                lines = response.iter_lines()
                next(lines)
                assert live.state.loop.running
                assert live.free_slots() < before
        except httpx.ReadTimeout:
            assert not stream
    generated = live.state.llm.engine.counters.generated_tokens
    wait_until(live.idle)
    live.check()
    assert live.free_slots() == before
    assert live.state.llm.engine.counters.generated_tokens <= generated + 100 * samples


def test_clients_that_go_away_at_any_moment(live: Live) -> None:
    before = live.free_slots()

    async def leave(i: int) -> None:
        body = {**HELLO, "max_tokens": 500, "ignore_eos": True, "stream": bool(i % 2)}
        async with httpx.AsyncClient() as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.post(live.url + CHAT, json=body, timeout=60), 0.002 * i)

    async def all_of_them() -> None:
        await asyncio.gather(*(leave(i) for i in range(40)))

    asyncio.run(all_of_them())
    wait_until(live.idle)
    live.check()
    assert live.free_slots() == before


def test_comments_keep_a_silent_stream_open(tiny_model_dir: Path, tmp_path: Path) -> None:
    with live_server(tiny_model_dir, tmp_path, sse_keepalive="1ms") as live:
        long = {**HELLO, "messages": [{"role": "user", "content": "x" * 6000}]}
        lines = live.post(CHAT, {**long, "stream": True}).text.split("\n\n")
        assert ": keep-alive" in lines
        data = [line for line in lines if line.startswith("data: ")]
        assert len(data) == 7
        refused = live.post(CHAT, {**HELLO, "stream": True, "temperature": 1000})
        assert refused.status_code == 400


def test_fused_reuse_needs_an_open_gate(live: Live) -> None:
    body = {**HELLO, "documents": [{"doc_id": "1", "text": "a document"}], "cache": {"reuse": "fused", "explain": True}}
    answer = live.post(CHAT, body).json()
    told = {name: answer["cache"][name] for name in ("asked", "ran", "fallback_reason", "gate")}
    assert told == {"asked": "fused", "ran": "exact", "fallback_reason": "quality_gate", "gate": "closed"}
    assert answer["usage"]["prompt_tokens_details"]["cache_ops"] == 3
    refused = live.post(CHAT, {**body, "cache": {"reuse": "fused", "fallback": "refuse"}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "reuse_refused")


def test_forced_gates_fuse_and_say_so(tiny_model_dir: Path, tmp_path: Path) -> None:
    with live_server(tiny_model_dir, tmp_path, gate="force", technique="naive") as live:
        documents = [{"doc_id": f"{i}", "text": f"document {i} " * 40} for i in range(2)]
        body = {**HELLO, "documents": documents, "cache": {"reuse": "fused", "explain": True}}
        cold = live.post(CHAT, {**body, "cache": {"reuse": "fused", "fallback": "refuse"}})
        assert (cold.status_code, cold.json()["error"]["code"]) == (409, "reuse_refused")
        assert "no_chunk_hit" in cold.json()["error"]["message"]
        warm = {"messages": HELLO["messages"], "documents": documents, "what": "chunks"}
        assert live.post("/v1/cache/warm", warm).is_success
        swapped = {**body, "documents": documents[::-1]}
        answer = live.post(CHAT, swapped).json()
        assert answer["cache"]["gate"] == "forced"
        assert (answer["cache"]["ran"], answer["cache"]["technique"]) == ("fused", "naive")
        assert (
            answer["usage"]["prompt_tokens_details"]["fused_tokens"] > 400
        )  # one is exact: it stands where it was computed


def test_render_and_tokenize_tell_what_the_model_reads(live: Live) -> None:
    part = {"type": "text", "text": "a document", "cache": {"segment": "doc:1"}}
    body = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [part]}]}
    rendered = live.post(f"{CHAT}/render", body).json()
    assert rendered["token_ids"] == live.post("/tokenize", body).json()["tokens"]
    (piece,) = [p for p in rendered["pieces"] if p["segment"]]
    start, stop = piece["span"]
    decoded = live.post("/detokenize", {"tokens": rendered["token_ids"][start:stop]}).json()
    assert decoded == {"prompt": "a document"}
    assert set(rendered["owners"][start:stop]) == {1}
    assert live.post(CHAT, body | {"max_tokens": 1}).json()["usage"]["prompt_tokens"] == len(rendered["token_ids"])
