"""Rendering: the template's own text, cut at segments, told apart by message."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document
from kvweave.errors import InvalidRequest, TemplateRefused
from kvweave.models.chat_template import ChatTemplate, Rendered
from tests.models import templates

SHAPES = {name: value for name, value in vars(templates).items() if name.isupper()}
SPECIAL = {"bos_token": "<s>"}
A, B = Document("First text,\nof two lines.  ", id="doc:a", title="A"), Document("Second text.", id="doc:b", title="B")
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}


def call(number: int, arguments: Any = '{"q": "ä", "n": 1}') -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "find", "arguments": arguments}}


def conversation(*messages: tuple[str, Any], **options: Any) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in messages), **options)


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, **options)


def owned(rendered: Rendered) -> list[tuple[int | None, str]]:
    assert rendered.owners is not None
    return [(span.number, rendered.text[span.start : span.end]) for span in rendered.owners]


def joined(rendered: Rendered) -> str:
    return "".join(s.content if isinstance(s, Document) else s for s in rendered.prompt.segments)


AGENT = Conversation(
    (
        Message("user", "Where?"),
        Message("assistant", None, {"tool_calls": [call(1), call(2)]}),
        Message("tool", "Here.", {"tool_call_id": "call_1"}),
        Message("tool", "There.", {"tool_call_id": "call_2"}),
        Message("assistant", "Both."),
    ),
    tools=(TOOL,),
)


def test_header_content_and_end_belong_to_a_message_tools_to_nobody() -> None:
    rendered = template(templates.CHATML).render(AGENT)
    calls = '<call>find{"q": "ä", "n": 1}</call>'
    spans = owned(rendered)
    assert spans[0][0] is None
    assert spans[0][1].startswith("<|system|>Tools: ")
    assert spans[1:] == [
        (0, "<|user|>Where?<|end|>\n"),
        (1, f"<|assistant|>{calls}{calls}<|end|>\n"),
        (2, "<|user|><result>Here.</result>"),
        (3, "<result>There.</result><|end|>\n"),
        (4, "<|assistant|>Both.<|end|>\n"),
        (5, "<|assistant|>"),
    ]


def test_messages_written_in_front_of_the_loop() -> None:
    rendered = template(templates.LLAMA, now=lambda: datetime(2026, 1, 2)).render(
        conversation(("system", " Be kind. "), ("user", "Where?"), ("assistant", "Here."), tools=(TOOL,))
    )
    assert owned(rendered) == [
        (None, "<s>"),
        (0, "<|system|>Today is 00:00:00.000000. Be kind.<|end|>"),
        (1, "<|user|>Use a tool. Where?<|end|>"),
        (2, "<|assistant|>Here.<|end|>"),
        (3, "<|assistant|>"),
    ]


@pytest.mark.parametrize("source", [templates.BOTH, templates.BY_NUMBER, templates.LOOK_AHEAD])
def test_macros_numbers_filters_and_captured_text(source: str) -> None:
    rendered = template(source).render(conversation(("user", "Where?"), ("assistant", "Here."), ("user", "Sure?")))
    assert owned(rendered) == [
        (0, "<|user|>Where?<|end|>"),
        (1, "<|assistant|>Here.<|end|>"),
        (2, "<|user|>Sure?<|end|>"),
        (3, "<|assistant|>"),
    ]


def test_a_loop_inside_the_loop_and_one_in_a_macro() -> None:
    assert [number for number, _ in owned(template(templates.LOOK_AHEAD).render(AGENT))] == [0, 1, 2, 3, 4, 5]
    assert (1, "<|assistant|><|end|><call 1><call 1>") in owned(template(templates.LOOK_AHEAD).render(AGENT))


def test_text_that_cannot_be_attributed() -> None:
    assert template(templates.COLLECTED).render(conversation(("user", "Where?"), ("assistant", "Here."))).owners is None
    assert template(templates.COLLECTED).render(conversation(("user", "Where?"))).owners is None
    outside = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}{% set last = messages | last %}{{ last.content }}"
    assert template(outside).render(conversation(("user", "Where?"), ("user", "Here."))).owners is None


def test_owners_that_decrease_are_told_as_they_are() -> None:
    rendered = template(templates.BACKWARDS).render(conversation(("user", "Where?"), ("assistant", "Here.")))
    assert owned(rendered) == [(1, "<|assistant|>Here."), (0, "<|user|>Where?")]


@pytest.mark.parametrize(("source", "between"), [(templates.CHATML, "\n"), (templates.PARTS, ""), (templates.BOTH, "")])
def test_documents_are_segments_inside_their_white_space(source: str, between: str) -> None:
    rendered = template(source).render(conversation(("user", (A, B, "Who?"))))
    assert rendered.prompt.documents == (A, B)
    assert rendered.text.count(f"A\nFirst text,\nof two lines.  {between}B\nSecond text.{between}Who?") == 1
    assert (joined(rendered), rendered.opaque, rendered.prompt.add_bos) == (rendered.text, False, False)


@pytest.mark.parametrize("source", [templates.SHOUTING, templates.FORGETFUL])
def test_opaque_templates_give_the_whole_text(source: str) -> None:
    asked = conversation(("user", (A, "Who?")), ("assistant", "He."))
    rendered = template(source).render(asked)
    plain = template(source).render(conversation(("user", f"{A.title}\n{A.text}\nWho?"), ("assistant", "He.")))
    assert rendered.opaque
    assert not plain.opaque
    assert rendered.prompt.segments == (rendered.text,) == (plain.text,)
    assert rendered.owners == plain.owners != None  # noqa: E711


def test_segments_follow_messages_that_are_moved() -> None:
    rendered = template(templates.BACKWARDS).render(conversation(("user", (A,)), ("user", (B,))))
    assert rendered.prompt.documents == (B, A)
    assert not rendered.opaque


def test_documents_for_templates_that_read_them() -> None:
    rendered = template(templates.DOCUMENTS).render(conversation(("user", "Who?"), documents=(A, B)))
    assert rendered.text == ("<doc a A>First text,\nof two lines.  </doc><doc b B>Second text.</doc><|user|>Who?<|end|>")
    assert [(d.content, d.id) for d in rendered.prompt.documents] == [(A.text.strip(), "doc:a"), (B.text, "doc:b")]
    assert joined(rendered) == rendered.text


def test_escaped_documents_are_segments_as_they_are_written() -> None:
    rendered = template(templates.DOCUMENTS_AS_JSON).render(conversation(("user", "Who?"), documents=(A,)))
    assert [d.content for d in rendered.prompt.documents] == ["First text,\\nof two lines."]
    assert joined(rendered) == rendered.text


@pytest.mark.parametrize(
    ("source", "content"), [(templates.CHATML, "Who?"), (templates.BOTH, ("Who?",)), (templates.PARTS, "Who?")]
)
def test_documents_in_front_of_the_last_question(source: str, content: Any) -> None:
    first = conversation(("user", "Hi."), ("assistant", "Hello."), ("user", content), documents=(B, A))
    rendered = template(source).render(first)
    assert "<|user|>B\nSecond text.\nA\nFirst text,\nof two lines.  \nWho?<|end|>" in rendered.text
    assert rendered.prompt.documents == (B, A)


def test_documents_without_a_question() -> None:
    with pytest.raises(InvalidRequest, match="last user message"):
        template(templates.CHATML).render(conversation(("system", "Hi."), documents=(A,)))


def test_content_formats() -> None:
    asked = conversation(("user", ("One.", "Two.")))
    assert "One.Two." in template(templates.BOTH).render(asked).text
    assert "One.\nTwo." in template(templates.BOTH, content_format="string").render(asked).text
    assert "One.\nTwo." in template(templates.CHATML).render(asked).text
    assert "One." in template(templates.PARTS).render(conversation(("user", "One."))).text, "strings become lists"
    assert "'text': 'One.'" in template(templates.CHATML, content_format="parts").render(asked).text


def test_arguments_of_calls_as_the_template_wants_them() -> None:
    text = template(templates.ARGUMENTS_AS_TEXT).render(AGENT).text
    assert '<call>find{"q": "ä", "n": 1}</call>' in text
    as_object = Conversation((Message("assistant", "", {"tool_calls": [call(1, {"q": "ä"})]}),))
    assert '<call>find{"q": "ä"}</call>' in template(templates.ARGUMENTS_AS_TEXT).render(as_object).text
    broken = Conversation((Message("assistant", "", {"tool_calls": [call(1, '{"q": ')]}),))
    assert '<call>find"{\\"q\\": "</call>' in template(templates.CHATML).render(broken).text


def test_continuing_the_last_message() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    rendered = template(templates.CHATML).render(conversation(("user", "Where?"), ("assistant", "It is "), **options))
    assert owned(rendered) == [(0, "<|user|>Where?<|end|>\n"), (1, "<|assistant|>It is ")]
    trimmed = template(templates.LLAMA).render(conversation(("user", "Where?"), ("assistant", "It is "), **options))
    assert trimmed.text.endswith("<|assistant|>It is")
    document = template(templates.PARTS).render(conversation(("user", (A,)), **options))
    assert document.text.endswith("of two lines.  ")
    assert document.prompt.documents == (A,)
    with pytest.raises(TemplateRefused, match="continue_final_message"):
        template(templates.FORGETFUL).render(conversation(("user", "A long question"), **options))
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        template(templates.CHATML).render(conversation(("user", "x"), continue_final_message=True))


def test_the_clock_stands_still_while_a_conversation_is_rendered() -> None:
    times = iter(datetime(2026, 1, 1) + timedelta(microseconds=i) for i in range(1000))
    rendered = template(templates.LLAMA, now=lambda: next(times)).render(conversation(("user", (A, "Who?"))))
    assert not rendered.opaque
    assert rendered.owners is not None


def test_kwargs_reach_the_template() -> None:
    source = "{{ mood }}{{ reasoning_effort }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    kwargs = {"mood": "wild", "reasoning_effort": "low"}
    assert template(source).render(conversation(("user", "x"), template_kwargs=kwargs)).text == "wildlow<s>x"
    with pytest.raises(InvalidRequest, match="'messages'"):
        template(source).render(conversation(("user", "x"), template_kwargs={"messages": []}))


@pytest.mark.parametrize(
    ("source", "asked", "message"),
    [
        (templates.PARTS, conversation(("assistant", "x")), "must alternate"),
        ("{{ 1 / 0 }}", conversation(("user", "x")), "refuses"),
        ("{{ nothing.at.all }}", conversation(("user", "x")), "undefined"),
        ("{% for m in messages %}{{ m.content.__class__.__mro__ }}{% endfor %}", conversation(("user", "x")), "unsafe"),
    ],
)
def test_refusals(source: str, asked: Conversation, message: str) -> None:
    with pytest.raises(TemplateRefused, match=message):
        template(source).render(asked)


def test_broken_templates_and_empty_conversations() -> None:
    with pytest.raises(TemplateRefused, match="isn't valid"):
        template("{% for %}")
    with pytest.raises(InvalidRequest, match="at least one message"):
        template(templates.CHATML).render(Conversation(()))
    with pytest.raises(InvalidRequest, match=r"messages\[0\] isn't JSON"):
        template(templates.CHATML).render(Conversation((Message("user", "x", {"name": object()}),)))


def test_text_with_nearly_all_noncharacters_has_no_segments() -> None:
    every = "".join(map(chr, [*range(0xFDD0, 0xFDF0), 0xFFFE]))
    rendered = template(templates.CHATML).render(conversation(("user", (A, every))))
    assert rendered.opaque
    assert rendered.owners is None
    assert template(templates.CHATML).render(conversation(("user", (A, every[2:])))).prompt.documents == (A,)


TEXTS = st.text(st.sampled_from("ab \n{%}'\"\\<|>ä\ufdd0\ufdd1b0e1o\uffff</think>"), max_size=12)
CONTENTS = st.one_of(TEXTS, st.lists(st.one_of(TEXTS, TEXTS.map(Document)), max_size=4).map(tuple))


@settings(deadline=None)
@given(shape=st.sampled_from(sorted(SHAPES)), contents=st.lists(CONTENTS, min_size=1, max_size=5))
def test_pieces_and_owners_are_the_text(shape: str, contents: list[Any]) -> None:
    messages = [("assistant" if i % 2 else "user", content) for i, content in enumerate(contents)]
    rendered = FIXED[shape].render(conversation(*messages))
    bare = [
        (role, c if isinstance(c, str) else tuple(p if isinstance(p, str) else p.text for p in c)) for role, c in messages
    ]
    assert rendered.text == FIXED[shape].render(conversation(*bare)).text, "marks change nothing"
    assert joined(rendered) == rendered.text
    if rendered.owners is not None:
        assert [s.start for s in rendered.owners] == [0, *(s.end for s in rendered.owners[:-1])]
        assert rendered.owners[-1].end == len(rendered.text)
    if not rendered.opaque and shape not in ("FORGETFUL", "BACKWARDS", "SHOUTING"):
        given_documents = [p.content for _, c in messages if not isinstance(c, str) for p in c if isinstance(p, Document)]
        assert [d.content for d in rendered.prompt.documents] == [c for c in given_documents if c]


FIXED = {name: template(source, now=lambda: datetime(2026, 1, 1)) for name, source in SHAPES.items()}
