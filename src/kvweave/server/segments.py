"""Labels that callers gave to parts of their prompts: what is cached under them, for how long, how often it was used."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from kvweave.core.report import ReuseReport, SegmentReport
from kvweave.errors import PinQuotaExceeded, SegmentNotFound
from kvweave.llm import LLM
from kvweave.protocol.cache import Pin
from kvweave.server.pins import Content, Pins, Placed, placed, prefix_of
from kvweave.server.state import Answered, Exchange

LOG = logging.getLogger("kvweave.server")
KEEP = 10_000
"""Labels remembered for each tenant."""

Key = tuple[str, str]
"""Salt and label."""


@dataclass
class _Entry:
    kind: str
    content: Content
    tokens: int
    text: bytes
    """Digest of its token ids: the identity behind the label."""
    created: float
    last_used: float
    hits: int = 0
    expires: float | None = None
    pin_seconds: float | None = None
    pinned_until: float | None = None


class SegmentDirectory:
    """The labels of all tenants, in memory. Times are unix seconds. Thread-safe; may wait for tiers."""

    def __init__(self, llm: LLM, keep: int = KEEP) -> None:
        self._llm = llm
        self._pins = Pins(llm)
        self._keep = keep
        self._tenants: dict[str, OrderedDict[Key, _Entry]] = {}
        self._lock = threading.Lock()

    def finished(self, exchange: Exchange, answered: Answered) -> None:
        """A prompt was answered: its labels were used, what it pins is pinned, and older pins of it last as long again."""
        if exchange.pins or any(span.document is not None for span in exchange.prompt.spans):
            documents = self.note(exchange, answered.outputs[0].reuse)
            try:
                self.pin_marked(exchange, documents)
            except PinQuotaExceeded as error:  # others took the room while it was answered
                LOG.warning("request %s: %s", exchange.request_id, error)

    def note(self, exchange: Exchange, report: ReuseReport | None = None) -> list[Placed]:
        """Remember the labels of a prompt; returns all its documents."""
        documents = placed(self._llm, exchange.tenant, exchange.salt, exchange.prompt)
        uses = {segment.start: segment for segment in report.segments} if report is not None else {}
        used = []
        with self._lock:
            for one in documents:
                if one.document.id is not None:
                    entry = self._enter(exchange.tenant, (exchange.salt, one.document.id), one, exchange.ttl)
                    entry.hits += _reused(uses.get(one.start))
                    used.append(entry)
        for entry in used:
            self._renew(entry)
        return documents

    def check_pins(self, exchange: Exchange) -> None:
        """Raise ``PinQuotaExceeded`` if the strict pins of a prompt would be too much even for a tenant without any other.

        To be asked before the prompt runs: what else is pinned may be unpinned until it is answered.
        """
        strict = [pin for pin in exchange.pins if pin.strict]
        if strict:
            documents = placed(self._llm, exchange.tenant, exchange.salt, exchange.prompt)
            prefix = max((_stop(pin, exchange) for pin in strict if pin.document is None), default=0)
            self._pins.check([one for one in documents if any(_means(pin, one) for pin in strict)], prefix)

    def pin_marked(self, exchange: Exchange, documents: Sequence[Placed]) -> None:
        """Pin what a prompt marks. Raises ``PinQuotaExceeded`` for strict pins; others are given up if there is no room."""
        for pin in exchange.pins if exchange.publish else ():
            try:
                if pin.document is None:
                    prefix = prefix_of(self._llm, exchange.tenant, exchange.salt, exchange.prompt, _stop(pin, exchange))
                    self._pins.pin(prefix, pin.seconds)
                for one in documents:
                    if _means(pin, one):
                        self._pin(exchange, one, pin.seconds)
            except PinQuotaExceeded:
                if pin.strict:
                    raise
                LOG.info("request %s: a pin was given up, there is no room within the quotas", exchange.request_id)

    def page(self, tenant: str, salt: str, prefix: str, limit: int, after: str) -> tuple[list[dict[str, Any]], bool]:
        """Labels that start with ``prefix`` and come behind ``after``, in order; whether there are more."""
        with self._lock:
            labels = sorted(label for s, label in self._tenants.get(tenant, ()) if s == salt and label.startswith(prefix))
        start = bisect_right(labels, after)
        shown = labels[start : start + limit]
        return [self.describe(tenant, salt, label) for label in shown], start + limit < len(labels)

    def describe(self, tenant: str, salt: str, label: str) -> dict[str, Any]:
        """Raises ``SegmentNotFound``."""
        entry = self._find(tenant, salt, label)
        pinned = entry.pinned_until if entry.pinned_until is not None and entry.pinned_until > time.time() else None
        return {
            "id": label,
            "object": "cache.segment",
            "kind": entry.kind,
            **self._cached(entry.content, entry.tokens),
            "hits": entry.hits,
            "created": entry.created,
            "last_used": entry.last_used,
            "expires_at": entry.expires,
            "pinned_until": pinned,
        }

    def tell(self, exchange: Exchange, one: Placed) -> dict[str, Any]:
        """What is cached of a document of a prompt that was noted; more if it has a label."""
        if one.document.id is not None:
            return self.describe(exchange.tenant, exchange.salt, one.document.id)
        return {"id": None, "object": "cache.segment", "kind": one.document.kind} | self._cached(
            one.content, one.stop - one.start
        )

    def _cached(self, content: Content, tokens: int) -> dict[str, Any]:
        held = self._pins.held(content, tokens)
        return {
            "tokens": tokens,
            "bytes": sum(one.bytes for one in held.values()),
            "tiers": {tier: {"tokens": one.tokens, "bytes": one.bytes} for tier, one in held.items()},
            "provenance": "chunk" if held.keys() - {"device"} else "prefix" if held else None,
        }

    def pin(self, tenant: str, salt: str, label: str, seconds: float) -> float:
        """Keep what is cached under a label for so long, and again from each use on; returns the unix time of the end.

        Raises ``SegmentNotFound``, ``PinQuotaExceeded``.
        """
        entry = self._find(tenant, salt, label)
        until = self._pins.pin(entry.content, seconds)
        with self._lock:
            entry.pin_seconds, entry.pinned_until = seconds, until
        return until

    def _pin(self, exchange: Exchange, one: Placed, seconds: float) -> None:
        if one.document.id is None:
            self._pins.pin(one.content, seconds)
        else:
            self.pin(exchange.tenant, exchange.salt, one.document.id, seconds)

    def unpin(self, tenant: str, salt: str, label: str) -> None:
        """Raises ``SegmentNotFound``."""
        entry = self._find(tenant, salt, label)
        self._pins.unpin(entry.content)
        with self._lock:
            entry.pin_seconds = entry.pinned_until = None

    def remove(self, tenant: str, salt: str, label: str) -> int:
        """Forget a label and its chunk records; returns how many there were. Raises ``SegmentNotFound``.

        Exact prefixes that it stands in stay until they make room: they are other prompts' as well.
        """
        entry = self._find(tenant, salt, label)
        if entry.pin_seconds is not None:
            self._pins.unpin(entry.content)
        with self._lock:
            self._tenants.get(tenant, OrderedDict()).pop((salt, label), None)
        return self._llm.engine.parts.chunks.store.remove(entry.content.chunks)

    def erase(self, tenant: str) -> int:
        """Forget all labels of a tenant; returns how many there were."""
        with self._lock:
            return len(self._tenants.pop(tenant, ()))

    def totals(self, tenant: str) -> dict[str, int]:
        """Labels of a tenant, and how many of them are pinned."""
        now = time.time()
        with self._lock:
            entries = list(self._tenants.get(tenant, OrderedDict()).values())
        return {"count": len(entries), "pinned": sum((entry.pinned_until or 0) > now for entry in entries)}

    def _find(self, tenant: str, salt: str, label: str) -> _Entry:
        with self._lock:
            entry = self._tenants.get(tenant, OrderedDict()).get((salt, label))
        if entry is None:
            raise SegmentNotFound(
                f"No segment '{label[:128]}' for this key and salt. List them with GET /v1/cache/segments."
            )
        return entry

    def _enter(self, tenant: str, key: Key, one: Placed, ttl: float | None) -> _Entry:
        """A new text under an old label is a new segment, to which the label moves."""
        now, text = time.time(), _digest(one)
        entries = self._tenants.setdefault(tenant, OrderedDict())
        entry = entries.get(key)
        if entry is None or entry.text != text:
            entry = _Entry(one.document.kind, one.content, one.stop - one.start, text, now, now)
            entries[key] = entry
        entry.content, entry.last_used = one.content, now
        entry.expires = None if ttl is None else max(entry.expires or 0.0, now + ttl)
        entries.move_to_end(key)
        while len(entries) > self._keep:
            entries.popitem(last=False)
        return entry

    def _renew(self, entry: _Entry) -> None:
        if entry.pin_seconds is None:
            return
        try:
            until = self._pins.pin(entry.content, entry.pin_seconds)
        except PinQuotaExceeded:  # what it stands in now is longer than what was pinned
            LOG.info("a pin couldn't be renewed within the quotas, and runs out in its own time")
            return
        with self._lock:
            entry.pinned_until = until


def _reused(segment: SegmentReport | None) -> bool:
    return segment is not None and any(n for kind, n in segment.tokens.items() if kind != "prefilled")


def _means(pin: Pin, one: Placed) -> bool:
    """True if a pin's document is this one, which the template may have trimmed."""
    document = pin.document
    return document is not None and (document.id, document.content) == (one.document.id, one.document.content)


def _stop(pin: Pin, exchange: Exchange) -> int:
    """Tokens up to the end of the message that a pin names; all of them where it names none, or messages have no tokens."""
    if pin.message is None or exchange.owners is None:
        return len(exchange.prompt.token_ids)
    return sum(1 for owner in exchange.owners if owner is None or owner <= pin.message)


def _digest(one: Placed) -> bytes:
    ids: Sequence[int] = one.content.prefix[one.start :]
    return blake3(array("I", ids).tobytes()).digest(length=16)
