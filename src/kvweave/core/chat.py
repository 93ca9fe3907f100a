"""A conversation as the engine's side knows it: validated, free of any wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvweave.core.prompt import Document

Content = str | Sequence[str | Document] | None
"""Of a message: a text, texts and documents in any order, or nothing (an assistant who only calls tools)."""


@dataclass(frozen=True)
class Message:
    """One message. ``extra`` holds what only templates read: tool_calls, tool_call_id, name, reasoning_content."""

    role: str
    content: Content
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conversation:
    """What a chat template renders. ``tools`` are OpenAI's tool definitions; ``documents`` stand where the template wants
    them, or else in front of the last user message's text.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Document, ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
