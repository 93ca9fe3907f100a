"""The templates of published models, from a folder of ``*.jinja`` files named by KVWEAVE_TEST_CHAT_TEMPLATES."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document
from kvweave.errors import TemplateRefused
from kvweave.models.chat_template import ChatTemplate
from kvweave.tools import TOOL_PARSERS, pick_parser

FOLDER = os.environ.get("KVWEAVE_TEST_CHAT_TEMPLATES")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
pytestmark = pytest.mark.skipif(not FILES, reason="KVWEAVE_TEST_CHAT_TEMPLATES names no folder of templates")

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
# Of those, the ones that write a conversation at once or its last answer outside the loop: they can't be edited.
UNATTRIBUTED = ("Reka-Edge",)
PROPERTIES = {"q": {"type": "string", "description": "What to find."}, "n": {"type": "integer", "description": "How many."}}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds things.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["q"]},
    },
}
DOCUMENTS = tuple(Document(f"Text {i} of\n two lines. ", id=f"doc:{i}", title=f"Title {i}") for i in range(3))


def calls(arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"id": "abcdefgh1", "type": "function", "function": {"name": "find", "arguments": arguments}}]}


TALK = (
    Message("user", "Where is it?"),
    Message("assistant", " In the <b>house</b>. "),
    Message("user", "Which house?\n"),
)
AGENT = (
    Message("user", "Find it."),
    Message("assistant", "", calls({"q": "ä b", "n": 3})),
    Message("tool", "Found: 42.", {"tool_call_id": "abcdefgh1", "name": "find"}),
    Message("assistant", "There are 42."),
    Message("user", "Thank you."),
)


@pytest.fixture(params=FILES, ids=lambda f: f.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param


def make(file: Path) -> ChatTemplate:
    return ChatTemplate(file.read_text(encoding="utf-8"), SPECIAL)


@pytest.mark.parametrize(
    "asked",
    [
        Conversation(TALK),
        Conversation((Message("system", " Be kind. "), *TALK), template_kwargs={"enable_thinking": False}),
        Conversation(TALK, tools=(TOOL,), add_generation_prompt=False),
        Conversation(TALK[:2], add_generation_prompt=False, continue_final_message=True),
        Conversation(AGENT, tools=(TOOL,)),
    ],
    ids=["talk", "system", "tools", "continue", "agent"],
)
def test_the_text_is_the_one_of_transformers(file: Path, asked: Conversation) -> None:
    template = make(file)
    if template.habits.arguments_as_text or not template.habits.text:
        pytest.skip("takes another form than the one written here")
    messages = [{"role": m.role, "content": m.content, **m.extra} for m in asked.messages]
    try:
        theirs = render_jinja_template(
            [messages],
            tools=list(asked.tools) or None,
            chat_template=file.read_text(encoding="utf-8"),
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            **SPECIAL,
            **asked.template_kwargs,
        )[0][0]
    except (TemplateError, TypeError, ValueError):
        with pytest.raises(TemplateRefused):
            template.render(asked)
        return
    assert template.render(asked).text == theirs


def test_documents_come_out_whole(file: Path) -> None:
    asked = Conversation((Message("user", (*DOCUMENTS[:2], "Which?")),), tools=(TOOL,))
    try:
        rendered = make(file).render(asked)
    except TemplateRefused:
        pytest.skip("refuses a question alone")
    assert not rendered.opaque
    assert rendered.prompt.documents == DOCUMENTS[:2]
    pieces = [s.content if isinstance(s, Document) else s for s in rendered.prompt.segments]
    assert "".join(pieces) == rendered.text


def test_documents_of_the_conversation(file: Path) -> None:
    asked = Conversation((Message("user", "Which?"),), tools=(TOOL,), documents=DOCUMENTS)
    try:
        rendered = make(file).render(asked)
    except TemplateRefused:
        pytest.skip("refuses documents without their own place")
    assert not rendered.opaque
    assert [d.id for d in rendered.prompt.documents] == [d.id for d in DOCUMENTS]


def test_messages_are_told_apart(file: Path) -> None:
    try:
        rendered = make(file).render(Conversation(AGENT, tools=(TOOL,)))
    except TemplateRefused:
        pytest.skip("knows no tools")
    if file.stem in UNATTRIBUTED:
        assert rendered.owners is None
        return
    assert rendered.owners is not None
    numbers = [span.number for span in rendered.owners]
    assert numbers == sorted(numbers, key=lambda n: -1 if n is None else n), "in the order of the messages"
    for i, message in enumerate(AGENT):
        own = "".join(rendered.text[s.start : s.end] for s in rendered.owners if s.number == i)
        others = "".join(rendered.text[s.start : s.end] for s in rendered.owners if s.number not in (None, i))
        if isinstance(message.content, str) and message.content in rendered.text and message.content:
            assert message.content in own
            assert message.content not in others


def test_a_parser_for_tool_calls_is_known(file: Path) -> None:
    name = pick_parser(file.read_text(encoding="utf-8"))
    assert name is None or name in TOOL_PARSERS
