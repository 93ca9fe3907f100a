"""Constrained answers: whatever is sampled parses and validates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import LLM, SamplingParams
from kvweave.core.sampling import Constraint, ConstraintFactory
from kvweave.engine.sampler import Sampler
from kvweave.errors import InvalidRequest, MissingExtra, UnsupportedParameter
from kvweave.models.constraints import GrammarCompiler
from kvweave.models.sources import resolve
from kvweave.models.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONGEST = 600  # tokens; a token of the small tokenizer is a byte


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, [tokenizer.backend.eos_token_id])


def answer(
    tokenizer: Tokenizer, constraint: Constraint | None, seed: int, rows: int | None = None, likely: str = ""
) -> tuple[str, bool]:
    """What random logits say (those of ``likely`` tokens raised), and whether it came to an end."""
    eos = tokenizer.backend.eos_token_id
    bias = dict.fromkeys(tokenizer.encode_text(likely), 6.0)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=LONGEST, logit_bias=bias)
    sampler = Sampler(params, (), frozenset({eos}), constraint)
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    while len(ids) < LONGEST:
        token, _ = sampler.sample(torch.randn(rows or len(tokenizer.backend), generator=generator))
        if token == eos:
            return tokenizer.decode(ids), True
        ids.append(token)
        if sampler.finished:
            return tokenizer.decode(ids), True
    return tokenizer.decode(ids), False


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n}, st.integers(-50, 50), st.integers(0, 99)
        ),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 8)),
        st.builds(lambda v: {"enum": v}, st.lists(st.text(max_size=5) | st.integers(), min_size=1, max_size=3, unique=True)),
        st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
    )


def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    return st.one_of(
        st.builds(lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(
            lambda p: {"type": "object", "properties": p, "required": list(p), "additionalProperties": False}, properties
        ),
        st.builds(lambda *options: {"anyOf": list(options)}, inner, inner),
    )


@settings(max_examples=40, deadline=None)
@given(schema=st.recursive(leaves(), containers, max_leaves=4), seed=st.integers(0, 2**32))
def test_every_answer_is_valid(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], seed: int) -> None:
    text, ended = answer(tokenizer, compiler.json_schema(schema)(), seed)
    if ended:
        jsonschema.validate(json.loads(text), schema)
    else:
        assert len(text) > LONGEST / 4  # white space between many things; never stuck


def test_random_answers_end_and_without_the_constraint_are_no_json(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """So that the tests around this one test something."""
    factory = compiler.json_schema(PERSON)
    constrained = [answer(tokenizer, factory(), seed) for seed in range(8)]
    assert all(ended for _, ended in constrained)
    assert len({json.loads(text)["name"] for text, _ in constrained}) > 4
    with pytest.raises(ValueError):
        json.loads(answer(tokenizer, None, 0)[0])


def test_a_json_object_is_any_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    factory = compiler.json_object()
    found = [answer(tokenizer, factory(), seed, likely='"}]:,') for seed in range(12)]
    values = [json.loads(text) for text, ended in found if ended]
    assert len(values) > 8
    assert all(isinstance(value, dict) for value in values)
    assert any(values)


def test_white_space_comes_to_an_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text, _ = answer(tokenizer, compiler.json_object()(), 0, likely=" \n\t")
    blanks = text.replace("\n", " ").replace("\t", " ")
    assert " " * 20 in blanks
    assert " " * 33 not in blanks


def test_logits_may_be_longer_than_the_vocabulary(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for seed in range(4):
        text, ended = answer(tokenizer, compiler.json_schema(PERSON)(), seed, rows=len(tokenizer.backend) + 77)
        assert ended
        jsonschema.validate(json.loads(text), PERSON)


def test_answers_of_one_factory_do_not_share_a_state(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    factory = compiler.json_schema(PERSON)
    first, second = factory(), factory()
    for token in tokenizer.encode_text('{"name'):
        first.accept(token)
    assert second.allowed() == factory().allowed() != first.allowed()
    for token in tokenizer.encode_text('":"x","age":7}'):
        assert not first.finished
        first.accept(token)
    assert first.finished
    assert not second.finished


def test_a_token_that_is_not_allowed_is_an_error_that_stays(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.json_object()()
    with pytest.raises(InvalidRequest, match="response_format"):
        constraint.accept(tokenizer.encode_text("x")[0])
    with pytest.raises(InvalidRequest, match="response_format"):
        constraint.allowed()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nope"},
        {"type": "string", "pattern": "("},
        {"$ref": "#/nowhere"},
        {"type": "object", "properties": 3},
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "array", "uniqueItems": True},
        {"minimum": float("nan")},
        {"default": object()},
        json.loads('{"type":"array","items":' * 300 + "{}" + "}" * 300),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_schemas_that_cannot_be_kept_are_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format: this schema can't be used: .+\. Change it\.$") as caught:
        compiler.json_schema(schema)
    assert caught.value.param == "response_format"
    assert len(str(caught.value)) < 300


def test_schemas_the_refusals_are_close_to_are_taken(compiler: GrammarCompiler) -> None:
    for schema in ({"type": "integer", "minimum": 1, "maximum": 5}, {"type": "string", "pattern": "(a)"}, {"default": {}}):
        assert any(compiler.json_schema(schema)().allowed())


def test_without_the_library_the_extra_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"kvweave\[structured\]"):
        GrammarCompiler(tokenizer, [2])


def test_a_tokenizer_of_another_library_is_refused() -> None:
    class Foreign:
        backend = object()

    with pytest.raises(UnsupportedParameter, match="tokenizer"):
        GrammarCompiler(Foreign(), [2])  # type: ignore[arg-type]


def run(llm: LLM, factory: ConstraintFactory | None, prompt: str, **options: Any) -> list[tuple[str, str]]:
    request = llm.request(prompt, SamplingParams(**options), samples=2, constraint=factory)
    (sequence,) = llm.loop.run([request])
    outputs = [sample.output for sample in sequence.samples]
    return [(output.text, output.finish_reason) for output in outputs if output is not None]


def test_samples_of_one_request_through_the_engine(tiny_model_dir: Path) -> None:
    with LLM(tiny_model_dir, threads=1) as llm:
        compiler = GrammarCompiler(llm.tokenizer, llm.engine.parts.eos_ids)
        found = run(llm, compiler.json_schema(PERSON), "who?", max_tokens=LONGEST, temperature=1.0, seed=1)
        assert len(set(found)) == 2
        for text, reason in found:
            assert reason == "stop"
            jsonschema.validate(json.loads(text), PERSON)
        ((cut, reason), _) = run(llm, compiler.json_schema(PERSON), "who?", max_tokens=3)
        assert reason == "length"
        assert '{"name'.startswith("".join(cut.split()))


@pytest.mark.model
def test_the_demo_model_answers_in_json() -> None:
    with LLM("demo", threads=1) as llm:
        compiler = GrammarCompiler(llm.tokenizer, llm.engine.parts.eos_ids)
        prompt = "Marie Curie died at the age of 66. As JSON with the name and the age:\n"
        for options in ({}, {"temperature": 1.5, "seed": 3}):
            for text, reason in run(llm, compiler.json_schema(PERSON), prompt, max_tokens=120, **options):
                assert reason == "stop"
                jsonschema.validate(json.loads(text), PERSON)
        tokenizer = Tokenizer(resolve("demo", home=None).directory)
        ended = 0
        for seed in range(6):
            text, whole = answer(tokenizer, compiler.json_schema(PERSON)(), seed, rows=49_200)
            ended += whole
            if whole:
                jsonschema.validate(json.loads(text), PERSON)
        assert ended >= 5
