"""Conversations of words as prompts: a word is a token, a message is its role, its words and an end."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.core.chat import Conversation, Message
from kvweave.core.keys import ModelFingerprint
from kvweave.core.prompt import Document, TokenPrompt, TokenSpan
from kvweave.core.report import ReuseReport
from kvweave.server.shape import RequestShape

KEY = bytes(range(32))
MODEL = ModelFingerprint.of(content="m")
END = 1

Turn = tuple[str, str | Sequence[str | Document]]


def ids(text: str, vocabulary: str = "") -> list[int]:
    return [2 + int.from_bytes((vocabulary + word).encode(), "big") % 50_021 for word in text.split()]


def tokenise(*turns: Turn, tools: str = "", vocabulary: str = "") -> tuple[TokenPrompt, list[int | None], Conversation]:
    spans: list[TokenSpan] = []
    owners: list[int | None] = []
    for i, (role, content) in enumerate(turns):
        text = ids(f"<{role}>") if i or not tools else [*ids(tools, vocabulary), *ids(f"<{role}>")]
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str):
                text += ids(part, vocabulary)
                continue
            spans += [TokenSpan(tuple(text)), TokenSpan(tuple(ids(part.content, vocabulary)), part)]
            text = []
        spans.append(TokenSpan((*text, END)))
        owners += [i] * (sum(len(s.token_ids) for s in spans) - len(owners))
    spans.append(TokenSpan(tuple(ids("<assistant>"))))
    owners.append(len(turns))
    messages = tuple(Message(role, content) for role, content in turns)
    definitions = ({"name": tools},) if tools else ()
    return TokenPrompt(tuple(spans)), owners, Conversation(messages, definitions)


def shape(
    *turns: Turn, tools: str = "", salt: str = "", model: ModelFingerprint = MODEL, vocabulary: str = ""
) -> RequestShape:
    prompt, owners, conversation = tokenise(*turns, tools=tools, vocabulary=vocabulary)
    return RequestShape.of(
        prompt, key=KEY, fingerprint=model, salt=salt, template="words", conversation=conversation, owners=owners
    )


def exact(prompt: RequestShape, hit: int) -> ReuseReport:
    return ReuseReport(
        asked="exact",
        ran="exact",
        technique="prefix",
        prompt_tokens=prompt.num_tokens,
        cached_tokens=hit,
        prefix_tokens=hit,
        prefilled_tokens=prompt.num_tokens - hit,
    )


def words(n: int, seed: int = 0) -> str:
    return " ".join(f"w{seed}x{i}" for i in range(n))
