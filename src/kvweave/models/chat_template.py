"""Conversations to text with a model's chat template: rendered whole, cut at segments, told apart by message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jinja2 import Template, meta
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvweave.core.chat import Conversation
from kvweave.core.prompt import Document, Prompt, Segment
from kvweave.errors import InvalidRequest, TemplateRefused
from kvweave.models import attribution
from kvweave.models.marks import LEAVE, OWNER, Mark, Marks, Span, owner_spans, segment_spans
from kvweave.models.template_inputs import ContentFormat, Inputs, cut_continuation, find_habits, make_inputs

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model reads it.

    ``text`` is what the template wrote, ``prompt`` the same, cut at segments. ``opaque``: the template doesn't write
    segments as they are, so ``prompt`` is one piece (reason ``template_opaque``). ``owners``: the message that each stretch
    of ``text`` belongs to: None in front of the first message's, the number of messages for the generation prompt. It is
    None as a whole if the template's text can't be told apart by message: such a conversation can't be edited.
    """

    prompt: Prompt
    text: str
    opaque: bool
    owners: tuple[Span, ...] | None


class ChatTemplate:
    """A Jinja template, in the environment that transformers gives it.

    ``variables`` are what every render sees: the tokenizer's special tokens by name. ``content_format``: contents with
    several texts are joined by new lines (``string``), handed over as a list (``parts``), or as the template is found to
    want them (``auto``). ``now`` is the clock templates read.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        content_format: ContentFormat = "auto",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._variables = {"add_generation_prompt": False, **variables}
        self._now = now
        try:
            self._template: Template = _compile_jinja_template(source)
            environment = self._template.environment
            self._attributed = environment.from_string(attribution.attributed(environment.parse(source)))
        except TemplateError as error:
            raise TemplateRefused(f"The chat template isn't valid: {error}. Correct it, or name another file.") from error
        self.habits = find_habits(
            lambda inputs: self._run(self._template, inputs, self._variables),
            reads_documents="documents" in meta.find_undeclared_variables(environment.parse(source)),
            content_format=content_format,
        )

    def render(self, conversation: Conversation) -> Rendered:
        """Raises ``TemplateRefused`` where the template does, ``InvalidRequest`` for what no template can be given."""
        _check(conversation)
        inputs = make_inputs(conversation, self.habits)
        variables = {
            **self._variables,
            "add_generation_prompt": conversation.add_generation_prompt,
            "strftime_now": self._now().strftime,  # one time for all renders
            **conversation.template_kwargs,
        }
        text = self._run(self._template, inputs, variables)
        marks = Marks.absent_from(text)
        found = _Found() if marks is None else self._find(conversation, text, marks, variables, len(inputs.segments))
        segments = _cut(text, found.segments, inputs.segments)
        owners = found.owners if found.owners and _all_owned(conversation, text, found.owners) else None
        return Rendered(Prompt(segments or [text], add_bos=False), text, segments is None, owners)

    def _find(self, conversation: Conversation, text: str, marks: Marks, variables: Mapping[str, Any], count: int) -> _Found:
        """Render again with marks; what comes back must be ``text`` once they are off."""

        def marked(template: Template, inputs: Inputs) -> list[Mark] | None:
            numbers = {id(message): i for i, message in enumerate(inputs.messages)}

            def owner(generating: object, *candidates: object) -> str:
                found = next((numbers[id(c)] for c in candidates if id(c) in numbers), None)
                return marks.mark(OWNER, len(numbers) if generating else found)

            own = {attribution.OWNER: owner, attribution.LEAVE: marks.mark(LEAVE)}
            try:
                read, found = marks.read(self._run(template, inputs, {**variables, **own}))
            except TemplateRefused:  # it looks into what it writes, and takes offence at marks
                return None
            return found if read == text else None

        with_segments = make_inputs(conversation, self.habits, marks)
        in_segments = in_owners = marked(self._attributed, with_segments)
        if in_segments is None:
            in_segments = marked(self._template, with_segments)
            in_owners = marked(self._attributed, make_inputs(conversation, self.habits))
        return _Found(
            None if in_segments is None else segment_spans(in_segments, count),
            None if in_owners is None else tuple(owner_spans(in_owners, len(text))),
        )

    def _run(self, template: Template, inputs: Inputs, variables: Mapping[str, Any]) -> str:
        given = {"messages": inputs.messages, "tools": inputs.tools, "documents": inputs.documents}
        try:
            text = template.render({**variables, **given})
        except Exception as error:  # a template is a program: it may raise anything
            reason = str(error).strip().split("\n")[0][:300]
            raise TemplateRefused(
                f"The chat template refuses these messages: {reason}. Check their roles, their order and the tool calls."
            ) from error
        return cut_continuation(text) if inputs.continued else text


@dataclass(frozen=True)
class _Found:
    """Where segments and messages stand in a text; None where marks couldn't show it."""

    segments: list[Span] | None = None
    owners: tuple[Span, ...] | None = None


def _check(conversation: Conversation) -> None:
    if not conversation.messages:
        raise InvalidRequest("messages is empty. Give at least one message.")
    if conversation.add_generation_prompt and conversation.continue_final_message:
        raise InvalidRequest("continue_final_message needs add_generation_prompt to be false. Set one of the two.")
    for name in _RESERVED:
        if name in conversation.template_kwargs:
            raise InvalidRequest(f"chat_template_kwargs must not have '{name}'. Give it as a field of the request.")


def _cut(text: str, spans: list[Span] | None, documents: tuple[Document, ...]) -> list[Segment] | None:
    """Text and documents by turns; None where a document's text isn't one a segment can have."""
    if spans is None:
        return None if documents else [text]
    segments: list[Segment] = []
    last = 0
    for span, document in ((s, documents[s.number]) for s in spans if s.number is not None):
        inside = text[span.start : span.end]
        if inside != document.content:  # its title stands elsewhere, or the template escapes it
            document = replace(document, text=inside, title=None)
        if document.content != inside:
            return None
        segments += [text[last : span.start], document]
        last = span.end
    return [s for s in [*segments, text[last:]] if s]


def _all_owned(conversation: Conversation, text: str, owners: tuple[Span, ...]) -> bool:
    """False if nothing is known to be a message's, or a message's content isn't though it is there: written outside a loop.

    What is written in front of all loops counts as the first message's, so that one is not looked for.
    """
    numbers = {span.number for span in owners}
    if numbers == {None}:
        return False
    for i, message in enumerate(conversation.messages):
        content = message.content if isinstance(message.content, str) else ""
        if i and i not in numbers and content.strip() and content.strip() in text:
            return False
    return True
