"""Every format: calls as models write them, what isn't one, and streams that are cut anywhere."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import UnknownOption
from kvweave.tools import TOOL_PARSERS, ContentDelta, ParsedAnswer, ToolCallDelta, get_parser, pick_parser
from tests.tools.answers import ANSWERS, ARGUMENTS, EMPTY, NO_CALLS, OBJECT

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "q": {"type": "string"},
                    "n": {"type": "integer"},
                    "exact": {"type": ["boolean", "null"]},
                    "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "tags": {"type": "array"},
                },
            },
        },
    }
]


def found(parsed: ParsedAnswer) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


def streamed(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    stream = get_parser(name).stream(TOOLS)
    content, calls = "", []
    for delta in [delta for piece in pieces for delta in stream.push(piece)] + stream.flush():
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif delta.name is not None:
            assert (delta.index, bool(delta.id), delta.arguments) == (len(calls), True, "")
            calls.append((delta.name, ""))
        else:
            assert delta.id is None
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return content, calls


def same(name: str, text: str, pieces: list[str]) -> None:
    whole = get_parser(name).parse(text, TOOLS)
    content, calls = streamed(name, pieces)
    assert content == (whole.content or "")
    assert calls == [(call.name, call.arguments) for call in whole.tool_calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_calls(name: str, text: str, content: str | None, calls: list[Any]) -> None:
    parsed = get_parser(name).parse(text, TOOLS)
    assert found(parsed) == calls
    assert parsed.content == content
    assert len({call.id for call in parsed.tool_calls}) == len(calls)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_stays(name: str, text: str) -> None:
    assert get_parser(name).parse(text) == ParsedAnswer(text, ())


@pytest.mark.parametrize(("name", "text"), [(a[0], a[1]) for a in ANSWERS] + NO_CALLS)
def test_a_character_at_a_time(name: str, text: str) -> None:
    same(name, text, [*text[:2000], text[2000:]])


MARKS = {o for p in TOOL_PARSERS.values() for o in (*p.format.openings, *p.format.starts)}
PARTS = (
    *(
        "</tool_call>",
        "<parameter=q>",
        "</parameter>",
        "</function>",
        "<tool_call|>",
        "call:",
        "<|tool_call_end|>",
        "[ARGS]",
    ),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<｜tool▁sep｜>",
        "```",
        "<|message|>",
        "<|call|>",
        "analysis",
    ),
    *("find", "find>", '"find">', "here()", "q=", " to=functions.find", *'[]{}"\\\n ;,é🙂', '<|"|>'),
)
FRAGMENTS = [*sorted(MARKS), OBJECT, EMPTY, ARGUMENTS, *PARTS]
TEXTS = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.lists(st.sampled_from([a[1] for a in ANSWERS] + ["Hello ", "\n"]), max_size=3).map("".join),
    st.text(max_size=30),
)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({p % (len(text) + 1) for p in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(edges)]


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(sorted(TOOL_PARSERS)), text=TEXTS, places=st.lists(st.integers(0, 10_000), max_size=20))
def test_streams_are_what_the_whole_is(name: str, text: str, places: list[int]) -> None:
    same(name, text, cut(text, places))


@settings(deadline=None, max_examples=200)
@given(answer=st.sampled_from(ANSWERS), start=st.integers(0, 400), length=st.integers(0, 3), put=st.sampled_from(FRAGMENTS))
def test_damaged_calls_never_raise(answer: Any, start: int, length: int, put: str) -> None:
    name, text, *_ = answer
    at = start % (len(text) + 1)
    damaged = text[:at] + put + text[at + length :]
    same(name, damaged, list(damaged))


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_plain_text_is_not_changed(text: str) -> None:
    for name in ("hermes", "qwen3_coder", "mistral", "openai"):
        assert get_parser(name).parse(text) == ParsedAnswer(text, ())


def test_content_streams_at_once_and_calls_when_they_are_complete() -> None:
    stream = get_parser("hermes").stream()
    assert stream.push("Let me ") == [ContentDelta("Let me")]
    assert stream.push("see <to") == [ContentDelta(" see")]
    assert stream.push("ol_call>" + OBJECT[:-1]) == []
    assert stream.push("}") == []
    name, arguments = stream.push("</tool_call>")
    assert isinstance(name, ToolCallDelta)
    assert (name.index, name.name, name.arguments) == (0, "find", "")
    assert arguments == ToolCallDelta(0, None, None, '{"q": "a b", "n": 3}')
    assert stream.push("\n") == stream.flush() == []


def test_the_final_channel_streams() -> None:
    stream = get_parser("openai").stream()
    assert stream.push("<|channel|>final<|message|>Hello") == [ContentDelta("Hello")]
    assert stream.push(" you") == [ContentDelta(" you")]


def test_types_of_arguments_come_from_the_schema() -> None:
    def parse(arguments: str, tools: Any) -> Any:
        text = f"<tool_call><function=find>{arguments}</function></tool_call>"
        return json.loads(get_parser("qwen3_coder").parse(text, tools).tool_calls[0].arguments)

    given_arguments = {"q": "7", "n": "7", "exact": "True", "where": "null", "tags": '["a"]', "other": "1.5", "word": "a: b"}
    text = "".join(f"<parameter={k}>\n{v}\n</parameter>" for k, v in given_arguments.items())
    typed = {"q": "7", "n": 7, "exact": True, "where": None, "tags": ["a"], "other": 1.5, "word": "a: b"}
    assert parse(text, TOOLS) == typed
    assert parse(text, ()) == {**typed, "q": 7}
    assert parse("<parameter=n>\nseven\n</parameter>", TOOLS) == {"n": "seven"}


def test_halves_of_surrogate_pairs_can_be_sent() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"s": "\\ud83d\\ude00 \\ud800 é"}}</tool_call>'
    arguments = get_parser("hermes").parse(call).tool_calls[0].arguments
    assert arguments.encode()
    assert json.loads(arguments) == {"s": "😀 \ud800 é"}
    assert get_parser("pythonic").parse('[f(s="\\ud83d\\ude00")]').tool_calls[0].arguments == '{"s": "\\ud83d\\ude00"}'


def test_ids() -> None:
    assert get_parser("hermes").parse(f"<tool_call>{OBJECT}</tool_call>").tool_calls[0].id.startswith("call_")
    mistral = get_parser("mistral").parse(f"[TOOL_CALLS]find{ARGUMENTS}").tool_calls[0].id
    assert len(mistral) == 9
    assert mistral.isalnum()
    kimi = next(text for name, text, *_ in ANSWERS if name == "kimi_k2")
    assert [call.id for call in get_parser("kimi_k2").parse(kimi).tool_calls] == ["functions.find:0", "here:1"]


def test_names() -> None:
    with pytest.raises(UnknownOption, match="Did you mean 'hermes'"):
        get_parser("herms")
    assert {a[0] for a in ANSWERS} == set(TOOL_PARSERS), "every parser has an example"
    assert not TOOL_PARSERS["functionary"].needs_special_tokens
    assert TOOL_PARSERS["mistral"].needs_special_tokens


@pytest.mark.parametrize(
    ("template", "family", "name"),
    [
        ("<tool_call>\n{{ call | tojson }}\n</tool_call>", "qwen2", "hermes"),
        ("<tool_call>\n<function={{ name }}>\n<parameter=", "qwen3", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", None, "mistral"),
        ("{{ ' to=functions.' + name }}<|channel|>commentary", None, "openai"),
        ("{{ message.content }}", "llama4", "pythonic"),
        ("{{ message.content }}", "llama", None),
        ("", None, None),
    ],
)
def test_picking(template: str, family: str | None, name: str | None) -> None:
    assert pick_parser(template, family) == name


def test_a_long_call_is_not_read_again_for_every_token() -> None:
    parser = get_parser("hermes")
    reads: list[int] = []

    class Counting:
        openings, starts = parser.format.openings, parser.format.starts

        def read(self, text: str, final: bool, tools: Any) -> Any:
            reads.append(len(text))
            return parser.format.read(text, final, tools)

    stream = type(parser)("counting", Counting()).stream()
    stream.push('<tool_call>{"name": "w", "arguments": {"s": "')
    for _ in range(1000):
        assert stream.push("word ") == []
    assert stream.push('"}}</tool_call>')
    assert len(reads) == 2
