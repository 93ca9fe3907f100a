"""The library as its users see it, on a tiny model directory with a tokenizer and a chat template."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvweave
from kvweave import LLM, Document, Prompt, SamplingParams
from kvweave.errors import (
    BrokenModel,
    ContextLengthExceeded,
    InvalidOption,
    InvalidRequest,
    ModelNotFound,
    RequestAborted,
    SelfCheckFailed,
    UnknownOption,
    UnknownTechnique,
)

TEXTS = [" ".join(f"word{i}{j}" for j in range(40)) for i in range(3)]
DOCS = [Document(t, id=f"doc:{i}") for i, t in enumerate(TEXTS)]


def make(directory: Path, **options: Any) -> LLM:
    base = {"threads": 1, "dtype": "float32", "attention": "blocked", "min_reuse_tokens": 0, "min_chunk": 8}
    return LLM(directory, **(base | options))


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with make(tiny_model_dir) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(llm: LLM) -> Iterator[None]:
    llm.reset_prefix_cache()
    yield
    llm.engine.check_integrity()
    assert llm.engine.scheduler.idle


def chat(*docs: Document, question: str = "word11 or word22?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*docs, question]}]


def test_documents_are_found_in_any_order(llm: LLM) -> None:
    assert {p.computed_tokens for p in llm.precompute(DOCS)} != {0}
    assert {p.computed_tokens for p in llm.precompute(DOCS)} == {0}
    for order in (DOCS, DOCS[::-1], [DOCS[1], DOCS[0], DOCS[2]]):
        out = llm.chat(chat(*order), SamplingParams(max_tokens=3), technique="epic")
        assert [s.result for s in out.reuse.segments] == ["hit"] * 3
        assert [s.id for s in out.reuse.segments] == [d.id for d in order]
        assert out.reuse.fused_tokens > 0
        assert "exact" in str(out.reuse)
        llm.reset_prefix_cache()


def test_options_of_the_llms_own_technique_are_kept(tiny_model_dir: Path) -> None:
    from kvweave.reuse.cacheblend import CacheBlend

    own = CacheBlend(schedule="gradual", deviation="v", check_layer=1)
    with make(tiny_model_dir, technique=own) as other:
        assert other._technique({"reuse": "fused"})[1] == own
        assert other._technique({"recompute_ratio": 0.3})[1] == CacheBlend(0.3, "gradual", "v", check_layer=1)
        assert other._technique({"reuse": "exact"})[1].name == "prefix"


def test_precompute_waits_for_running_requests(tiny_model_dir: Path) -> None:
    with make(tiny_model_dir) as other:
        n = len(other.tokenizer.encode_document(TEXTS[0]))
        per_token = other.engine.parts.pool.layout.bytes_per_token
    with make(tiny_model_dir, kv_pool=(n + 150) * per_token) as other:
        stream = other.stream("word1 word2", SamplingParams(max_tokens=100), reuse="off")
        next(stream)
        (done,) = other.precompute([DOCS[0]])
        assert done.computed_tokens == done.chunk_tokens == n
        assert list(stream)[-1].output is not None
    with make(tiny_model_dir, chunk_cache=0) as nothing:
        assert nothing.precompute([DOCS[0]])[0].chunk_tokens == 0


def test_exact_is_the_default_and_off_reads_nothing(llm: LLM) -> None:
    llm.precompute(DOCS)
    first = llm.chat(chat(*DOCS), SamplingParams(max_tokens=3))
    again = llm.chat(chat(*DOCS), SamplingParams(max_tokens=3))
    off = llm.chat(chat(*DOCS), SamplingParams(max_tokens=3), reuse="off")
    assert first.reuse.fused_tokens == again.reuse.fused_tokens == off.reuse.cached_tokens == 0
    assert again.reuse.prefilled_tokens == 1
    assert first.token_ids == again.token_ids == off.token_ids


def test_list_of_prompts_runs_as_one_batch(llm: LLM) -> None:
    prompts = [Prompt(["word1 word2", DOCS[0]]), "word3", Prompt([DOCS[1], DOCS[2], "word5 word6"])]
    together = llm.generate(prompts, SamplingParams(max_tokens=4), reuse="off")
    alone = [llm.generate(p, SamplingParams(max_tokens=4), reuse="off") for p in prompts]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, logprobs=2)
    deltas = list(llm.stream(chat(DOCS[0]), params, reuse="off"))
    out = deltas[-1].output
    assert out is not None
    assert "".join(d.text for d in deltas) == out.text
    assert tuple(d.token_id for d in deltas) == out.token_ids
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.token_ids)


def test_a_dropped_stream_frees_its_slots(llm: LLM) -> None:
    free = llm.engine.allocator.num_free
    stream = llm.stream("word1 word2", SamplingParams(max_tokens=50), reuse="off")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.loop.call(lambda engine: engine.allocator.num_free) == free
    assert llm.engine.scheduler.idle


def test_a_stream_that_is_never_read_holds_nothing(llm: LLM) -> None:
    free = llm.engine.allocator.num_free
    stream = llm.stream("word1 word2", SamplingParams(max_tokens=50), reuse="off")
    del stream
    llm.generate("word3", SamplingParams(max_tokens=1), reuse="off")
    assert llm.engine.scheduler.idle
    assert llm.engine.allocator.num_free == free


def test_a_failing_batch_ends_every_request_in_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever: whoever was in a batch that failed learns of it, and the engine goes on."""
    stream = llm.stream("word1 word2", SamplingParams(max_tokens=300), reuse="off")
    next(stream)

    def fails(plans: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "run", fails)
        with pytest.raises(RequestAborted, match="MemoryError"):
            llm.generate("word3", SamplingParams(max_tokens=3), reuse="off")
    with pytest.raises(RequestAborted, match="MemoryError"):
        list(stream)
    assert llm.generate("word3", SamplingParams(max_tokens=3), reuse="off").token_ids


def test_threads_take_turns(llm: LLM) -> None:
    expected = llm.generate("word1 word2 word3", SamplingParams(max_tokens=5), reuse="off").token_ids
    results: list[Any] = []

    def work() -> None:
        results.append(llm.generate("word1 word2 word3", SamplingParams(max_tokens=5)).token_ids)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [expected] * 6


def test_documents_cannot_inject_control_tokens(llm: LLM) -> None:
    special = llm.tokenizer._tokenizer.all_special_tokens[0]
    inside = llm.tokenizer.encode_document(f"word1 {special} word2")
    assert not set(inside) & set(llm.tokenizer._tokenizer.all_special_ids)
    assert set(llm.tokenizer.encode_text(special)) & set(llm.tokenizer._tokenizer.all_special_ids)


def test_a_document_has_the_same_ids_everywhere(llm: LLM) -> None:
    spans = [
        [s.token_ids for s in llm.tokenizer.tokenise(llm.render(chat(*order))).spans if s.document is DOCS[0]]
        for order in (DOCS, DOCS[::-1], [DOCS[0]], [DOCS[1], DOCS[0]])
    ]
    assert all(s == spans[0] and len(s) == 1 for s in spans)
    assert list(spans[0][0]) == llm.tokenizer.encode_document(DOCS[0].content)


def test_chat_ids_are_the_templates_own(llm: LLM) -> None:
    messages = [{"role": "user", "content": "word1 word2"}]
    ids = llm.tokenizer.tokenise(llm.render(messages)).token_ids
    theirs = llm.tokenizer._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(ids) == list(theirs)


def test_score_is_what_decode_sees(llm: LLM) -> None:
    out = llm.generate("word1 word2 word3", SamplingParams(max_tokens=4, logprobs=0), reuse="off")
    scores = llm.score("word1 word2 word3", out.token_ids, reuse="off").logits
    assert scores.argmax(-1).tolist() == list(out.token_ids)
    assert out.logprobs is not None
    expected = scores.log_softmax(-1)[torch.arange(4), torch.tensor(out.token_ids)]
    assert torch.allclose(torch.tensor([p.logprob for p in out.logprobs]), expected, atol=1e-4)


def test_bos_anchor_serves_any_prompt(tiny_model_dir: Path) -> None:
    with make(tiny_model_dir, anchor="bos") as other:
        other.precompute(DOCS)
        for prompt in (Prompt([*DOCS, "word1"]), other.render(chat(*DOCS))):
            report = other.generate(prompt, SamplingParams(max_tokens=1), technique="naive").reuse
            assert [s.result for s in report.segments] == ["hit"] * 3
    with make(tiny_model_dir, anchor="head") as head:
        head.precompute(DOCS)  # behind a chat head
        missed = head.generate(Prompt([*DOCS, "word1"]), SamplingParams(max_tokens=1), technique="naive").reuse
        assert [s.result for s in missed.segments] == ["miss"] * 3
        head.precompute(DOCS, head=Prompt([*DOCS, "word1"]))
        found = head.generate(Prompt([*DOCS, "word1"]), SamplingParams(max_tokens=1), technique="naive").reuse
        assert [s.result for s in found.segments] == ["hit"] * 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.generate(""), InvalidRequest, "empty"),
        (lambda m: m.generate(Prompt([])), InvalidRequest, "empty"),
        (lambda m: m.generate([["word1", 3]]), InvalidRequest, r"segments\[1\]"),
        (lambda m: m.generate("word1", technique="cachblend"), UnknownTechnique, "cacheblend"),
        (lambda m: m.generate("word1", recompute_ratio=2.0, technique="random"), InvalidOption, "between 0 and 1"),
        (lambda m: m.generate("word1", recompute_ration=0.2), UnknownOption, "recompute_ratio"),
        (lambda m: m.generate("word1", reuse="exact", technique="epic"), InvalidOption, "Leave one"),
        (lambda m: m.generate("word1", reuse="sometimes"), InvalidOption, "reuse"),
        (lambda m: m.generate("word1 " * 3000), ContextLengthExceeded, "limit"),
        (lambda m: m.precompute([Document("word1 " * 3000)]), InvalidRequest, "Cut it"),
        (lambda m: m.chat([{"role": "user"}]), InvalidRequest, "content"),
        (lambda m: m.chat([{"role": "user", "content": [3]}]), InvalidRequest, "content"),
        (lambda m: Document("x", id="a b"), InvalidRequest, "label"),
        (lambda m: m.generate([DOCS[0], "word1"]), InvalidRequest, "is a Prompt"),
        (lambda m: m.generate(DOCS[0]), InvalidRequest, "is a Prompt"),
        (lambda m: m.generate(None), InvalidRequest, "is a Prompt"),
        (lambda m: m.precompute(DOCS[0]), InvalidRequest, "list of Documents"),
        (lambda m: m.precompute(["word1"]), InvalidRequest, "list of Documents"),
        (lambda m: m.generate("\ud800 word1"), InvalidRequest, "surrogate"),
        (lambda m: Document("\ud800 word1"), InvalidRequest, "surrogate"),
        (lambda m: m.score("word1", [10**7]), InvalidRequest, "continuation"),
        (lambda m: m.score("word1", []), InvalidRequest, "continuation"),
        (lambda m: SamplingParams(max_tokens=2.5), InvalidOption, "whole number"),
        (lambda m: SamplingParams(stop=(1,)), InvalidOption, "strings"),
        (lambda m: m.generate("word1", technique=f"random:seed={10**30}"), InvalidOption, "seed"),
        (lambda m: m.generate(["word1", "word1 " * 3000]), ContextLengthExceeded, "limit"),
        (lambda m: Document(3), InvalidRequest, "string"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(llm: LLM, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call(llm)
    assert "\n" not in str(caught.value)


def test_bad_configuration_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    for options, error, message in (
        ({"kv_pol": "1GiB"}, UnknownOption, "kv_pool"),
        ({"kv_pool": "1 gig"}, InvalidOption, "not a size"),
        ({"kv_pool": 10}, InvalidOption, "KV pool"),
        ({"kv_pool": "999TiB"}, InvalidOption, "Make kv_pool smaller"),
        ({"chunk_cache": "9" * 400}, InvalidOption, "not a size"),
        ({"chunk_size": "512"}, InvalidOption, "chunk_size"),
        ({"chunk_cache": "auto"}, InvalidOption, "not a size"),
        ({"threads": 10**13}, InvalidOption, "threads"),
        ({"device": "cuda:7"}, InvalidOption, "CUDA"),
        ({"dtype": "float15"}, InvalidOption, "float32"),
        ({"device": "tpu"}, InvalidOption, "cuda"),
        ({"anchor": "tail"}, InvalidOption, "anchor"),
        ({"max_model_len": 10**7}, InvalidOption, "max_model_len"),
        ({"min_chunk": 600}, InvalidOption, "chunk_size"),
    ):
        with pytest.raises(error, match=message):
            make(tiny_model_dir, **options)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound):
        LLM(tmp_path / "nothing.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BrokenModel):
        LLM(tmp_path / "empty")


def test_a_wrong_rotation_fails_the_self_check(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the load-time check: keys rotated one position off are noticed, with the layer named."""
    from kvweave.kv.rotary import Rotary

    good = Rotary.at
    monkeypatch.setattr(Rotary, "at", lambda self, positions: good(self, positions * 2))
    with pytest.raises(SelfCheckFailed, match="layer 0"):
        make(tiny_model_dir)


def test_importing_is_free() -> None:
    import subprocess
    import sys

    code = "import sys, kvweave; print('torch' in sys.modules, 'transformers' in sys.modules, len(dir(kvweave)) > 5)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
    with pytest.raises(AttributeError):
        kvweave.nothing  # noqa: B018


def test_threads_get_their_own_tokens(llm: LLM) -> None:
    """A document's control tokens stay text and the chat's own stay what they are, whoever else encodes meanwhile."""
    prompt = llm.render(chat(Document("before <|end|> after", id="x")))
    expected = llm.tokenizer.tokenise(prompt).token_ids
    wrong: list[tuple[int, ...]] = []

    def work() -> None:
        for _ in range(1500):
            got = llm.tokenizer.tokenise(prompt).token_ids
            if got != expected:
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
