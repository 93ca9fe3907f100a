"""Where the KV of a segment is cached, and keeping it there: pins that hold within quotas, or are refused."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvweave.core.keys import ChunkKey, Scope
from kvweave.core.prompt import Document, TokenPrompt
from kvweave.engine.admission import namespace
from kvweave.engine.engine import Engine
from kvweave.errors import PinQuotaExceeded
from kvweave.llm import LLM
from kvweave.store.tiered import TieredStore

TENANT_SHARE = 0.25
"""Of host memory's budget, and of the KV pool: what one tenant may pin."""
ALL_SHARE = 0.5
"""What all pins together may hold."""
_LOOK = 2.0  # seconds that slower tiers have to say what they hold


@dataclass(frozen=True)
class Content:
    """Tokens that end a prompt's first part: what chunks they have, and the exact prefix up to their end."""

    scope: Scope
    chunks: Mapping[ChunkKey, int]
    """Tokens of each chunk, under every anchor that would be looked for; none where nothing but the prefix is meant."""
    prefix: Sequence[int]
    """Ids from the start of the prompt."""

    @property
    def namespace(self) -> str:
        return namespace(self.scope)


@dataclass(frozen=True)
class Placed:
    """A document of a prompt, at tokens [start, stop)."""

    document: Document
    start: int
    stop: int
    content: Content


@dataclass(frozen=True)
class Held:
    """What one tier has of a content. ``bytes`` of KV as the model uses it, however the tier packs it."""

    tokens: int
    bytes: int


def placed(llm: LLM, tenant: str, salt: str, prompt: TokenPrompt) -> list[Placed]:
    """The documents of a prompt, in order. Raises as ``LLM.request`` does."""
    anchors = llm.request(prompt, tenant=tenant, salt=salt).anchors
    index = llm.engine.parts.chunks
    scope, ids = index.scope(tenant, salt), array("I", prompt.token_ids)
    found, at = [], 0
    for span in prompt.spans:
        stop = at + len(span.token_ids)
        if span.document is not None:
            cut = [index.pieces(span.token_ids, a, scope) for a in anchors] if span.document.kind == "document" else []
            chunks = {p.identity.key: len(p.token_ids) for pieces in cut for p in pieces}
            found.append(Placed(span.document, at, stop, Content(scope, chunks, ids[:stop])))
        at = stop
    return found


def prefix_of(llm: LLM, tenant: str, salt: str, prompt: TokenPrompt, stop: int) -> Content:
    """The first ``stop`` tokens of a prompt."""
    return Content(llm.engine.parts.chunks.scope(tenant, salt), {}, array("I", prompt.token_ids[:stop]))


@dataclass(frozen=True)
class Pins:
    """Pins chunk records where there are any, else the exact prefix. Waits for tiers and for the engine's thread."""

    llm: LLM

    def held(self, content: Content, within: int) -> dict[str, Held]:
        """By tier, what is cached of a content's last ``within`` tokens; not a use. The prefix tree is on the device."""
        store, per_token = self.llm.engine.parts.chunks.store, self.llm.engine.parts.pool.layout.bytes_per_token
        tokens: dict[str, int] = {}
        covered = self.llm.loop.call(lambda engine: engine.tree.covered(content.prefix, content.namespace))
        tokens["device"] = max(0, covered - len(content.prefix) + within)
        if isinstance(store, TieredStore):
            deadline = time.monotonic() + _LOOK
            tokens["host"] = _tokens(content, (k for k in content.chunks if store.host.peek(k) is not None))
            for tier in store.tiers:
                tokens[tier.name] = _tokens(content, (k for k in content.chunks if tier.holds(k, deadline)))
        return {tier: Held(n, n * per_token) for tier, n in tokens.items() if n}

    def pin(self, content: Content, seconds: float) -> float:
        """Keep what is cached of a content for so long; returns the unix time of the end.

        Raises ``PinQuotaExceeded`` if the tenant's pins, or all of them, would hold too much; then none of it is pinned.
        """
        until = time.time() + seconds
        if not self._pin_chunks(content, until):
            self.llm.loop.call(lambda engine: _pin_prefix(engine, content, until))
        return until

    def unpin(self, content: Content) -> None:
        self.llm.engine.parts.chunks.store.unpin(content.chunks)
        self.llm.loop.call(lambda engine: engine.tree.pin(content.prefix, content.namespace, 0.0))

    def check(self, documents: Sequence[Placed], prefix: int) -> None:
        """Raise ``PinQuotaExceeded`` if a tenant could never pin these documents and so long a prefix together."""
        parts = self.llm.engine.parts
        size = sum(one.stop - one.start for one in documents) * parts.pool.layout.bytes_per_token
        _refuse_beyond(TENANT_SHARE, size, parts.chunks.store.stats().budget, "host memory")
        _refuse_beyond(TENANT_SHARE, prefix, parts.pool.num_slots, "the KV pool")

    def _pin_chunks(self, content: Content, until: float) -> bool:
        """False if no tier has a chunk of it."""
        store = self.llm.engine.parts.chunks.store
        pinned_before = store.pinned_bytes(content.scope.tag)
        pinned = store.pin(content.chunks, until)
        total, budget = store.pinned_bytes(content.scope.tag), store.stats().budget
        if total > TENANT_SHARE * budget and total > pinned_before:
            store.unpin(pinned)
            _refuse_beyond(TENANT_SHARE, total, budget, "host memory")
        return bool(pinned)


def _pin_prefix(engine: Engine, content: Content, until: float) -> None:
    tree, slots = engine.tree, engine.allocator.num_slots
    tree.pin(content.prefix, content.namespace, until)
    try:
        own = tree.pinned_tokens(f"{content.scope.tag.hex()}/")
        _refuse_beyond(TENANT_SHARE, own, slots, "the KV pool")
        _refuse_beyond(ALL_SHARE, tree.pinned_tokens(), slots, "the KV pool, those of others among them")
    except PinQuotaExceeded:
        tree.pin(content.prefix, content.namespace, 0.0)
        raise


def _refuse_beyond(share: float, wanted: int, capacity: int, where: str) -> None:
    if wanted > share * capacity:
        raise PinQuotaExceeded(
            f"Pins would hold {wanted / max(1, capacity):.0%} of {where}, quota {share:.0%}. Unpin something, or use ttl."
        )


def _tokens(content: Content, keys: Iterable[ChunkKey]) -> int:
    return sum(content.chunks[key] for key in keys)
