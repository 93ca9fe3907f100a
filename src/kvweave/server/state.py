"""What the routes of one server share, and how they tell the request log, the metrics and the segments what happened."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from kvweave.core.chat import Conversation
from kvweave.core.prompt import TokenPrompt
from kvweave.core.report import Output
from kvweave.models.constraints import GrammarCompiler
from kvweave.protocol.cache import Pin
from kvweave.protocol.limits import Limits
from kvweave.protocol.responses import Head
from kvweave.store.guard import Guarded
from kvweave.store.tiered import TieredStore
from kvweave.tools import ToolParser

if TYPE_CHECKING:
    from kvweave.engine.loop import EngineLoop
    from kvweave.llm import LLM
    from kvweave.reuse.gate import Gates
    from kvweave.server.keys import KeyRing
    from kvweave.server.request_log import RequestLog
    from kvweave.server.segments import SegmentDirectory
    from kvweave.server.settings import ServerSettings


LOG = logging.getLogger("kvweave.server")


@dataclass(frozen=True)
class Exchange:
    """One prompt that was accepted: who asked what, and what it is explained by."""

    id: str
    """Of the object that answers it."""
    request_id: str
    endpoint: str
    tenant: str
    salt: str
    prompt: TokenPrompt
    asked: str
    """off, exact, fused or auto."""
    gate: str | None = None
    """State of the technique's gate, where one was asked."""
    conversation: Conversation | None = None
    owners: Sequence[int | None] | None = None
    """Message of each prompt token; None: there are no messages, or they can't be told apart."""
    ignored: tuple[str, ...] = ()
    """Names of fields without effect."""
    warnings: tuple[str, ...] = ()
    operations: int = 0
    """Cache operations received."""
    publish: bool = True
    """False: nothing of it entered a cache."""
    ttl: float | None = None
    """Seconds that what it published lives."""
    pins: tuple[Pin, ...] = ()
    """What of it is to stay cached."""
    arrived: float = field(default_factory=time.time)
    """Unix time."""


@dataclass(frozen=True)
class Answered:
    """How an exchange ended well. Times are seconds from its arrival, as its client saw them."""

    outputs: tuple[Output, ...]
    """One a sample."""
    first_token: float
    intervals: tuple[float, ...]
    """Between tokens of one sample, all samples together."""
    total: float


class Metrics(Protocol):
    """Counts. Its methods may be called from several threads."""

    def finished(self, exchange: Exchange, answered: Answered) -> None: ...

    def failed(self, code: str) -> None:
        """A request got an error with this code of ``kvweave.errors``, whether or not it had been accepted."""
        ...

    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format."""
        ...


class Ignored:
    """Names of fields without effect, each of which the log tells once. For one thread."""

    _MOST = 1000  # names come from callers

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, names: Iterable[str]) -> None:
        new = sorted(set(names) - self._told)
        if new and len(self._told) < self._MOST:
            self._told.update(new)
            LOG.info("fields without effect: %s", ", ".join(new))


@dataclass
class ServerState:
    """One running server; ``app.state.server`` of its app."""

    settings: ServerSettings
    llm: LLM
    keys: KeyRing
    gates: Gates
    requests: RequestLog
    metrics: Metrics
    segments: SegmentDirectory
    workers: ThreadPoolExecutor
    """Rendering, tokenising and whatever else takes longer than an event loop may stand still."""
    tool_parser: ToolParser | None = None
    """None: answers of this model hold no calls that could be told from text."""
    ignored: Ignored = field(default_factory=Ignored)
    started_at: float = field(default_factory=time.time)
    """Unix time."""

    @property
    def loop(self) -> EngineLoop:
        return self.llm.loop

    @property
    def model_name(self) -> str:
        """As clients call it."""
        return self.settings.served_model_name or self.llm.name

    @cached_property
    def limits(self) -> Limits:
        return replace(Limits(), body_bytes=self.settings.body_bytes)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Raises ``MissingExtra`` and ``UnsupportedParameter``."""
        return GrammarCompiler(self.llm.tokenizer, self.llm.engine.parts.eos_ids)

    def head(self, id: str) -> Head:
        """What all objects of the answer ``id`` begin with."""
        return Head(id, int(time.time()), self.model_name, self.llm.built.fingerprint.short)

    def token_text(self, token_id: int) -> str:
        """One token as text, special or not."""
        return self.llm.tokenizer.decode([token_id], skip_special_tokens=False)

    def tiers_up(self) -> dict[str, bool]:
        """By slow tier, whether it is asked: one that fails again and again, or hangs, isn't."""
        store = self.llm.engine.parts.chunks.store
        tiers = store.tiers if isinstance(store, TieredStore) else ()
        media = [tier.medium for tier in tiers]
        return {m.name: not m.pool.stuck and (not isinstance(m.blobs, Guarded) or m.blobs.up) for m in media}
