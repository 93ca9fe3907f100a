"""What a chat template is given: a conversation as plain data, in the forms this template was found to take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document
from kvweave.errors import InvalidRequest, TemplateRefused
from kvweave.models.marks import Marks

ContentFormat = Literal["auto", "string", "parts"]

# Appended to a message that is to be continued, to see where it ends: transformers' own, so that templates treat it alike.
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")
_NEEDLE = "kvweave needle"
_PRINTED = ("'text': '", '"text": "', '"text":"')  # in front of a part's text where a template prints the list as it is
_PARAMETERS = {"type": "object", "properties": {}, "required": []}
_TOOL = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": _PARAMETERS}}


@dataclass(frozen=True)
class Habits:
    """Forms a template takes: contents as ``text``, as lists of ``parts``, or both; the variable ``documents``; calls with
    ``arguments_as_text`` (JSON) rather than an object; calls beside an ``empty_content``, not without any.
    """

    text: bool
    parts: bool
    documents: bool
    arguments_as_text: bool
    empty_content: bool


@dataclass(frozen=True)
class Inputs:
    """Variables of a template, and the segments in them in the order of their numbers."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    documents: list[dict[str, str]] | None
    segments: tuple[Document, ...]
    continued: bool = False
    """The last message ends with a tag, which ``cut_continuation`` finds in what the template writes."""


def find_habits(run: Callable[[Inputs], str], *, reads_documents: bool, content_format: ContentFormat) -> Habits:
    """Try a template out: ``run`` renders inputs, or raises ``TemplateRefused``."""

    def renders(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str | None:
        try:
            return run(Inputs(messages, tools, None, ()))
        except TemplateRefused:
            return None

    parts = renders([{"role": "user", "content": [{"type": "text", "text": _NEEDLE}]}]) or ""
    takes_parts = _NEEDLE in parts and not parts.partition(_NEEDLE)[0].endswith(_PRINTED)
    takes_text = _NEEDLE in (renders([{"role": "user", "content": _NEEDLE}]) or "") or not takes_parts
    arguments = {"key": _NEEDLE}
    as_object = renders(_call(arguments, content=""), [_TOOL])
    # An object that is printed as Python would, with single quotes, isn't JSON.
    refuses_objects = as_object is None or f"'{_NEEDLE}'" in as_object
    arguments_as_text = refuses_objects and renders(_call(json.dumps(arguments), content=""), [_TOOL]) is not None
    without_content = renders(_call(json.dumps(arguments) if arguments_as_text else arguments), [_TOOL])
    return Habits(
        text=content_format == "string" or (content_format == "auto" and takes_text),
        parts=content_format == "parts" or (content_format == "auto" and takes_parts),
        documents=reads_documents,
        arguments_as_text=arguments_as_text,
        empty_content=without_content is None,
    )


def _call(arguments: Any, **content: str) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [
        {"role": "user", "content": "Find."},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "content": "Found.", "tool_call_id": "abcdefghi", "name": "find"},
    ]


def make_inputs(conversation: Conversation, habits: Habits, marks: Marks | None = None) -> Inputs:
    """The conversation for a template; with ``marks``, around every segment that has text."""
    writer = _Writer(habits, marks)
    documents = list(conversation.documents)
    # With the number of the message in whose text they go, where the template has no place of its own for documents.
    place = None if habits.documents or not documents else _last_user_message(conversation.messages)
    given = [writer.document(d) for d in documents] if place is None and documents else None
    messages = []
    for i, message in enumerate(conversation.messages):
        plain = writer.message(message, documents if i == place else [])
        messages.append(_json(plain, f"messages[{i}]"))
    if conversation.continue_final_message:
        _tag_end(messages[-1])
    tools = [_json(tool, f"tools[{i}]") for i, tool in enumerate(conversation.tools)] or None
    return Inputs(messages, tools, given, tuple(writer.segments), conversation.continue_final_message)


def cut_continuation(rendered: str) -> str:
    """The text up to the end of the message that is to be continued; raises ``TemplateRefused`` if it isn't there."""
    at = rendered.rfind(_CONTINUE.strip())
    if at < 0:
        raise TemplateRefused(
            "The chat template leaves out the end of the last message, so it can't be continued. "
            "Set continue_final_message to false."
        )
    # Where the template trimmed the tag, it would have trimmed the message as well.
    return rendered[:at] if rendered.startswith(_CONTINUE, at) else rendered[:at].rstrip()


class _Writer:
    """Messages and documents as plain data; collects the segments on the way."""

    def __init__(self, habits: Habits, marks: Marks | None) -> None:
        self._habits = habits
        self._marks = marks
        self.segments: list[Document] = []

    def message(self, message: Message, leading: Sequence[Document]) -> dict[str, Any]:
        content = message.content
        plain = {key: value for key, value in message.extra.items() if value is not None}
        reasoning = next((plain[key] for key in _REASONING if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        if plain.get("tool_calls"):
            plain["tool_calls"] = [self._call(call) for call in plain["tool_calls"]]
        plain["role"] = message.role
        if content is None and not leading:
            return {**plain, "content": ""} if self._habits.empty_content else plain
        parts = [content] if isinstance(content, str) else content or ()
        before = [self._segment(d, _text(d)) for d in leading]
        texts = [p if isinstance(p, str) else self._segment(p, _text(p)) for p in parts]
        if self._habits.text and (isinstance(content, str | None) or not self._habits.parts):
            return {**plain, "content": "\n".join([*before, *texts])}
        texts = [text + "\n" for text in before] + texts
        return {**plain, "content": [{"type": "text", "text": text} for text in texts]}

    def document(self, document: Document) -> dict[str, str]:
        """An entry of the variable ``documents``: its text is the segment, title and label stay outside."""
        label = {} if document.id is None else {"doc_id": document.id.removeprefix("doc:")}
        title = {} if document.title is None else {"title": document.title}
        return {**label, **title, "text": self._segment(document, document.text)}

    def _segment(self, document: Document, text: str) -> str:
        if not text.strip():
            return text
        self.segments.append(document)
        return text if self._marks is None else self._marks.around(text, len(self.segments) - 1)

    def _call(self, call: Any) -> Any:
        """A tool call; its arguments are an object for templates that take one (on the wire they are JSON text)."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if isinstance(arguments, str) and not self._habits.arguments_as_text:
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:  # what a model wrote may be no JSON at all: the template gets it as it is
                return call
        elif not isinstance(arguments, str) and self._habits.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


def _text(document: Document) -> str:
    return f"{document.title}\n{document.text}" if document.title else document.text


def _last_user_message(messages: Sequence[Message]) -> int:
    for i in reversed(range(len(messages))):
        if messages[i].role == "user":
            return i
    raise InvalidRequest("documents: this model puts them in front of the last user message, but there is none. Add one.")


def _json(value: Any, where: str) -> Any:
    """A copy: a template's sandbox is only safe with plain data, and messages are told apart by identity."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{where} isn't JSON: {error}. Use texts, numbers, lists and objects.") from error


def _tag_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
    elif content:
        content[-1]["text"] += _CONTINUE
    else:
        raise TemplateRefused("continue_final_message: the last message has no text to continue. Give it one.")
