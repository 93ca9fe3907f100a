"""Text to ids and back. Documents never gain control tokens, and have the same ids wherever they stand."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document, Prompt, TokenPrompt, TokenSpan
from kvweave.errors import BrokenModel, InvalidOption, InvalidRequest, TemplateRefused, UnsupportedModel
from kvweave.models.chat_template import ChatTemplate, Rendered
from kvweave.models.encoder import Encoded, Encoder
from kvweave.models.template_inputs import ContentFormat

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A Hugging Face tokenizer and chat template, used the way segments need it. Thread-safe.

    Args:
        directory: the model's.
        chat_template: a file with a Jinja template, instead of the model's own.
        content_format: see ``ChatTemplate``.

    Raises ``BrokenModel``, ``UnsupportedModel`` or, for the template's file, ``InvalidOption``.
    """

    def __init__(self, directory: Path, chat_template: Path | None = None, content_format: ContentFormat = "auto") -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # the tokenizers library raises plain Exception for broken files
            line = str(error).strip().split("\n")[0][:200]
            raise BrokenModel(f"{directory}: the tokenizer can't be loaded: {line}. Fetch the model again.") from error
        if not self._tokenizer.is_fast:
            raise UnsupportedModel(
                f"{directory}: the tokenizer has no tokenizer.json. Use a version of the model that has one."
            )
        if chat_template is not None:
            self._tokenizer.chat_template = _read(chat_template)
        self._content_format = content_format
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.adds_bos = bool(self.bos_id is not None and self._tokenizer.encode("x")[:1] == [self.bos_id])
        backend = json.loads(self._tokenizer.backend_tokenizer.to_str())
        self._literal = Encoder(backend)
        self._document = Encoder(backend, never=_control_ids(self._tokenizer))
        self.special_ids = frozenset(token["id"] for token in backend["added_tokens"] if token["special"])

    @property
    def backend(self) -> Any:
        """The Hugging Face tokenizer, for libraries that read vocabularies. Don't encode with it."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template that conversations with tools are rendered with."""
        return self._tokenizer.get_chat_template(None, [{}]) if self.has_chat_template else None

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text segment: special tokens are recognised, none are added."""
        return self._literal.encode(text).ids

    def encode_document(self, text: str) -> list[int]:
        """Ids of a document: text that looks like a control token stays text."""
        return self._document.encode(text, inside=True).ids

    def tokenise(self, prompt: Prompt) -> TokenPrompt:
        """Each segment alone, concatenated; a BOS in front if this tokenizer puts one and the text has none."""
        spans = [
            TokenSpan(tuple(encoded.ids), segment if isinstance(segment, Document) else None)
            for segment, encoded in zip(prompt.segments, self._encode(prompt), strict=True)
        ]
        first = next((s.token_ids[0] for s in spans if s.token_ids), None)
        if prompt.add_bos and self.adds_bos and self.bos_id is not None and first != self.bos_id:
            spans.insert(0, TokenSpan((self.bos_id,)))
        tokens = TokenPrompt(tuple(spans))
        if not tokens.token_ids:
            raise InvalidRequest("The prompt has no tokens. Give at least one non-empty segment.")
        return tokens

    def render(self, conversation: Conversation) -> Rendered:
        """A conversation as the model reads it. Raises ``TemplateRefused``, also if there is no chat template."""
        if not self.has_chat_template:
            raise TemplateRefused("This model has no chat template. Name one with --chat-template, or send plain prompts.")
        return (self._with_tools if conversation.tools else self._without_tools).render(conversation)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """Chat messages as a prompt; their content is a string, a ``Document`` or a list of both."""
        return self.render(Conversation(tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages)))).prompt

    def owners(self, rendered: Rendered) -> list[int]:
        """For each token of ``tokenise(rendered.prompt)`` the message it belongs to: that of its first character.

        Text in front of the first message (tools, a default system text) belongs to message 0, the generation prompt to
        the number of messages. Raises ``TemplateRefused`` where messages can't be told apart, or the template reorders them.
        """
        if rendered.owners is None:
            raise TemplateRefused(
                "The chat template's text can't be attributed to messages (template_opaque). Send this request without drop "
                "and reposition."
            )
        starts = [span.start for span in rendered.owners]
        owners: list[int] = []
        base, last = 0, 0
        for segment, encoded in zip(rendered.prompt.segments, self._encode(rendered.prompt), strict=True):
            for start, end in encoded.offsets:
                if start < end:
                    owner = rendered.owners[max(0, bisect_right(starts, base + start) - 1)].number or 0
                    if owner < last:
                        raise TemplateRefused(
                            f"The chat template writes message {owner} behind message {last} (template_order). "
                            "Send this request without drop and reposition."
                        )
                    last = owner
                owners.append(last)
            base += len(segment.content if isinstance(segment, Document) else segment)
        return owners

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def _encode(self, prompt: Prompt) -> list[Encoded]:
        return [
            self._document.encode(segment.content, inside=True)
            if isinstance(segment, Document)
            else self._literal.encode(segment, inside=i > 0)
            for i, segment in enumerate(prompt.segments)
        ]

    @cached_property
    def _without_tools(self) -> ChatTemplate:
        return self._compiled(None)

    @cached_property
    def _with_tools(self) -> ChatTemplate:
        same = self.chat_template == self._tokenizer.get_chat_template(None, None)
        return self._without_tools if same else self._compiled([{}])

    def _compiled(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        source = self._tokenizer.get_chat_template(None, tools)
        return ChatTemplate(source, self._tokenizer.special_tokens_map, self._content_format)


def _control_ids(tokenizer: Any) -> frozenset[int]:
    """Special tokens, and added tokens that the chat template writes (``<tool_call>``); never those of mere white space."""
    templates = tokenizer.chat_template or ""
    written = "\0".join(templates.values()) if isinstance(templates, dict) else templates
    return frozenset(
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or token.content in written)
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"The chat template {file} can't be read: {error}. Name a UTF-8 text file.") from error


def _message(message: Mapping[str, Any], where: str) -> Message:
    content = message.get("content")
    parts = (content,) if isinstance(content, Document) else content
    if not isinstance(parts, str) and not (parts is None and message.get("tool_calls")):
        if not isinstance(parts, list | tuple) or not all(isinstance(p, str | Document) for p in parts):
            raise InvalidRequest(f"{where}.content: expected a string or a list of strings and Documents.")
        parts = tuple(parts)
    extra = {key: value for key, value in message.items() if key not in ("role", "content")}
    return Message(str(message.get("role", "")), parts, extra)


class IncrementalDecoder:
    """Text of a growing list of ids, piece by piece; holds back bytes that don't form a character yet.

    The pieces together are the text of all ids. A piece costs the same however long the list is.
    """

    _LONG, _SHORT = 16, 4  # ids: the window is shortened when it is this long, to about that

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []  # the last ids, decoded again each time
        self._shown = 0  # characters of the window's text that have been handed out

    def push(self, token_id: int) -> str:
        """Add an id; returns the text that became certain."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(text) - len(text.rstrip(_BROKEN))  # bytes of a character that may still be completed
        if len(self._window) >= 2 * self._LONG:
            held = min(held, 3)  # no character is that long
        certain = max(self._shown, len(text) - held)
        new, self._shown = text[self._shown : certain], certain
        if len(self._window) >= self._LONG:
            self._shorten(text, len(text) - certain)
        return new

    def flush(self) -> str:
        """What was held back."""
        text = self._decode(self._window)
        new, self._shown = text[self._shown :], len(text)
        return new

    def _shorten(self, text: str, held: int) -> None:
        """Drop the first ids of the window, if possible in front of a whole character."""
        for keep in range(self._SHORT, 2 * self._SHORT):
            tail = self._decode(self._window[-keep:])
            if (text.endswith(tail) and _BROKEN not in tail) or len(self._window) >= 2 * self._LONG:
                del self._window[:-keep]
                self._shown = max(0, len(tail) - held)
                return

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
