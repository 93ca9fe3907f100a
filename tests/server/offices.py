"""A server's accounts over a tiny model, without HTTP: prompts run, and all who keep accounts are told."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document
from kvweave.core.sampling import SamplingParams
from kvweave.llm import LLM
from kvweave.protocol.cache import Pin
from kvweave.server.accounts import record
from kvweave.server.metrics import ServerMetrics
from kvweave.server.request_log import RequestLog
from kvweave.server.segments import SegmentDirectory
from kvweave.server.state import Answered, Exchange


@dataclass
class Office:
    """``ask`` does what a chat route does; ``state`` is what routes share."""

    llm: LLM
    log: RequestLog = field(default_factory=RequestLog)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.segments = SegmentDirectory(self.llm)
        self.metrics = ServerMetrics("tiny", self.llm.engine)
        self.state: Any = SimpleNamespace(
            llm=self.llm, loop=self.llm.loop, requests=self.log, segments=self.segments, metrics=self.metrics
        )

    def exchange(
        self, *turns: tuple[str, Any], tenant: str = "t", salt: str = "", pins: tuple[Pin, ...] = (), **options: Any
    ) -> Exchange:
        number = next(self.numbers)
        conversation = Conversation(tuple(Message(role, content) for role, content in turns))
        prompt = self.llm.tokenizer.tokenise(self.llm.tokenizer.render(conversation).prompt)
        return Exchange(
            id=f"chatcmpl-{number}",
            request_id=f"req-{number}",
            endpoint="/v1/chat/completions",
            tenant=tenant,
            salt=salt,
            prompt=prompt,
            asked="exact",
            conversation=conversation,
            owners=_owners(prompt.token_ids, self.llm, len(turns)),
            pins=pins,
            **options,
        )

    def answer(self, exchange: Exchange, max_tokens: int = 4, **cache: Any) -> dict[str, Any]:
        request = self.llm.request(
            exchange.prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            tenant=exchange.tenant,
            salt=exchange.salt,
            ttl=exchange.ttl,
            publish=exchange.publish,
            **cache,
        )
        (sequence,) = self.llm.loop.run([request])
        assert sequence.output is not None
        return record(self.state, exchange, Answered((sequence.output,), 0.01, (), 0.1))

    def ask(self, *turns: tuple[str, Any], **options: Any) -> dict[str, Any]:
        return self.answer(self.exchange(*turns, **options))


def _owners(ids: tuple[int, ...], llm: LLM, messages: int) -> list[int | None]:
    """The test template ends each message with a token of its own."""
    (end,) = llm.tokenizer.encode_text("<|end|>")
    owners: list[int | None] = []
    at = 0
    for token in ids:
        owners.append(at)
        at += token == end
    assert at == messages
    return owners


def document(seed: int, label: str | None = None, n: int = 96) -> Document:
    return Document("".join(random.Random(seed).choices("abcdefgh", k=n)), id=label)
