"""Text to ids and back. Documents never gain control tokens, and have the same ids wherever they stand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvweave.core.prompt import Document, Prompt, TokenPrompt, TokenSpan
from kvweave.errors import BrokenModel, InvalidRequest

_MARKS = ("\ufdd0", "\ufdd1")  # Unicode noncharacters, in no real text: before and behind a document


class Tokenizer:
    """A Hugging Face tokenizer and chat template, used the way segments need it."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # the tokenizers library raises plain Exception for broken files
            line = str(error).strip().split("\n")[0][:200]
            raise BrokenModel(f"{directory}: the tokenizer can't be loaded: {line}. Fetch the model again.") from error
        # ``split_special_tokens`` is set on the tokenizer that all threads share, for the length of a call: without a lock a
        # document's text could become control tokens while another thread encodes the text around it.
        self._lock = threading.Lock()
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.adds_bos = bool(self.bos_id is not None and self._encode_default("x")[:1] == [self.bos_id])

    @property
    def backend(self) -> Any:
        """The Hugging Face tokenizer, for this package alone."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text segment: special tokens are recognised, none are added."""
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_document(self, text: str) -> list[int]:
        """Ids of a document: text that looks like a control token stays text."""
        with self._lock:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def tokenise(self, prompt: Prompt) -> TokenPrompt:
        """Each segment alone, concatenated; a BOS in front if this tokenizer puts one and the text has none."""
        spans = []
        for segment in prompt.segments:
            if isinstance(segment, Document):
                spans.append(TokenSpan(tuple(self.encode_document(segment.content)), segment))
            else:
                spans.append(TokenSpan(tuple(self.encode_text(segment))))
        first = next((s.token_ids[0] for s in spans if s.token_ids), None)
        if self.adds_bos and self.bos_id is not None and first != self.bos_id:
            spans.insert(0, TokenSpan((self.bos_id,)))
        tokens = TokenPrompt(tuple(spans))
        if not tokens.token_ids:
            raise InvalidRequest("The prompt has no tokens. Give at least one non-empty segment.")
        return tokens

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> Prompt:
        """A conversation as a prompt of text and document segments.

        ``messages`` are chat messages whose content is a string or a list of strings and ``Document``s. The whole
        conversation is rendered once plain and once with marks around every document; without the marks both must be
        the same text, so a template never sees anything that would change what it writes.
        """
        if not self.has_chat_template:
            raise InvalidRequest("This model has no chat template. Use generate() with plain segments.")
        documents: list[Document] = []
        plain, marked = [], []
        for i, message in enumerate(messages):
            content = message.get("content")
            parts = [content] if isinstance(content, str | Document) else content
            if not isinstance(parts, list | tuple) or not all(isinstance(p, str | Document) for p in parts):
                raise InvalidRequest(f"messages[{i}].content: expected a string or a list of strings and Documents.")
            texts, marks = [], []
            for part in parts:
                text = part.content if isinstance(part, Document) else part
                if any(m in text for m in _MARKS):
                    raise InvalidRequest(f"messages[{i}].content has the noncharacters U+FDD0 or U+FDD1. Remove them.")
                texts.append(text)
                if isinstance(part, Document):
                    documents.append(part)
                    text = _MARKS[0] + text + _MARKS[1]
                marks.append(text)
            plain.append({**message, "content": "\n".join(texts)})
            marked.append({**message, "content": "\n".join(marks)})
        rendered = self._render(plain)
        with_marks = self._render(marked)
        if with_marks.replace(_MARKS[0], "").replace(_MARKS[1], "") != rendered:
            raise InvalidRequest("The chat template changes documents (template_opaque). Use generate() with segments.")
        return Prompt(_cut(with_marks, documents))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _encode_default(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def _render(self, messages: list[dict[str, Any]]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"The chat template refuses these messages: {error}") from error


def _cut(marked: str, documents: list[Document]) -> list[str | Document]:
    """Split a rendered text at its marks; each marked piece must be its document's text, in order."""
    segments: list[str | Document] = []
    rest = marked
    for document in documents:
        before, opened, rest = rest.partition(_MARKS[0])
        inside, closed, rest = rest.partition(_MARKS[1])
        if not opened or not closed or inside != document.content:
            raise InvalidRequest("The chat template moves documents (template_opaque). Use generate() with segments.")
        segments += [before, document]
    segments.append(rest)
    return [s for s in segments if s]


class IncrementalDecoder:
    """Text of a growing list of ids, piece by piece; holds back bytes that don't form a character yet."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = 0  # ids whose text has been handed out
        self._from = 0  # decoding restarts here: far enough back for merges across ids

    def push(self, token_id: int) -> str:
        """Add an id; returns the text that became certain."""
        self._ids.append(token_id)
        before = self._tokenizer.decode(self._ids[self._from : self._done])
        now = self._tokenizer.decode(self._ids[self._from :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") or len(now) <= len(before):
            return ""
        self._from, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What was held back."""
        before = self._tokenizer.decode(self._ids[self._from : self._done])
        now = self._tokenizer.decode(self._ids[self._from :])
        self._done = len(self._ids)
        return now[len(before) :]
