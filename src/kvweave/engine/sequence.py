"""One running request: its tokens, slots, plans still to run, and what is counted on the way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvweave.core.plan import Load, RequestPlan, View
from kvweave.core.prompt import TokenPrompt
from kvweave.core.report import (
    TOKEN_KINDS,
    ControllerDecision,
    Delta,
    Deviation,
    Output,
    SegmentReport,
    TierLoad,
    TokenLogprob,
)
from kvweave.core.sampling import ConstraintFactory, SamplingParams
from kvweave.engine.executor import PlanResult
from kvweave.engine.sampler import Sampler
from kvweave.engine.swap import Swapped
from kvweave.engine.text_stream import TextStream
from kvweave.errors import IntegrityError
from kvweave.index.chunks import Found
from kvweave.reuse.base import ChunkHit, PlanRequest, Technique


@dataclass(frozen=True)
class Request:
    """What is asked of the engine. ``anchors``: what its documents' chunks may have been computed behind, best first."""

    prompt: TokenPrompt
    params: SamplingParams
    technique: Technique
    asked: str
    anchors: tuple[tuple[int, ...], ...] = ((),)
    keep_logits: int = 0
    """Logits of so many of the last prompt tokens are kept on the sequence, for evaluation."""
    tenant: str | None = None
    """Whose KV is found and published; None: the chunk index's own tenant."""
    salt: str = ""
    """Narrows the tenant's namespace."""
    samples: int = 1
    """Answers to one prompt, which is computed once."""
    prompt_logprobs: int | None = None
    """Log probabilities of the prompt's computed tokens, with so many of the most likely ones beside each."""
    publish: bool = True
    """False: nothing of it enters the prefix tree."""
    ttl: float | None = None
    """Seconds that what it publishes lives."""
    fallback_reason: str | None = None
    """Why it runs exact although something else was asked."""
    constraint: ConstraintFactory | None = None
    """What the answer must look like."""
    internal: bool = False
    """Asked for by kvweave itself, to fill a cache: not counted among requests."""


@dataclass
class Lookup:
    """What the caches had for a request, and which reuse that allows."""

    plan_request: PlanRequest
    ran: str
    technique: Technique
    fallback_reason: str | None
    segments: tuple[SegmentReport, ...]
    decision: ControllerDecision | None = None

    def lose(self, request: PlanRequest, hits: list[ChunkHit], reason: str) -> None:
        """Go on with ``request``; the documents of ``hits`` weren't found after all."""
        self.plan_request = request
        left = [*request.exact_hits, *request.hits]
        self.segments = tuple(
            replace(s, result="partial" if any(s.start <= h.start < s.stop for h in left) else "miss", reason=reason)
            if any(s.start <= h.start < s.stop for h in hits)
            else s
            for s in self.segments
        )


@dataclass(frozen=True)
class TokenClasses:
    """How a prompt's tokens were come by, told when its prefill is done: what a later preemption repeats isn't usage."""

    kinds: Tensor
    """[T] int64: index into ``TOKEN_KINDS`` of each prompt token."""
    prefix: int
    """Exact tokens at the start that the prefix tree had."""
    charged: int
    """Row-layers charged to the recompute budget."""
    published: int
    """Computed, and then put into the prefix tree."""

    def count(self, start: int = 0, stop: int | None = None) -> dict[str, int]:
        """Prompt tokens of [start, stop) by kind."""
        counts = torch.bincount(self.kinds[start:stop], minlength=len(TOKEN_KINDS)).tolist()
        return dict(zip(TOKEN_KINDS, counts, strict=True))


@dataclass(eq=False)
class Sequence:
    """State of one sample of a request. ``slots`` in order; those of the resident prefix are shared."""

    request: Request
    stream: TextStream
    max_new: int
    sampler: Sampler
    index: int = 0
    """Which sample of the request it is."""
    arrived: float = field(default_factory=time.perf_counter)
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    looking: Future[Found] | None = None
    """The lookup in the caches, on a thread of its own where tiers may be slow."""
    looked_since: float = 0.0
    """When it began (monotonic)."""
    gave_up: bool = False
    """The caches didn't answer in time: it runs without them."""
    lookup: Lookup | None = None
    plans: Iterator[RequestPlan] = field(default_factory=lambda: iter(()))
    pending: deque[RequestPlan] = field(default_factory=deque)
    """Blocks of the prefill that are left of the plan taken last."""
    loads: list[Load] = field(default_factory=list)
    """Begun for this request, whatever became of them."""
    load_wait: float = 0.0
    """Seconds in which steps waited for them."""
    restarts: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logits: list[Tensor] = field(default_factory=list)
    """Blocks [k, vocabulary]; together the last ``keep_logits`` prompt tokens."""
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    """By order in the prompt."""
    charged: int = 0
    recomputed: list[Tensor] = field(default_factory=list)
    """Orders of prompt tokens whose KV could have been reused and was computed."""
    computed: int = 0
    """Rows computed since it started."""
    classes: TokenClasses | None = None
    """Set when the prefill is done for the first time."""
    swapped: Swapped | None = None
    """Its KV, while it is preempted."""
    preemptions: int = 0
    deviations: list[Deviation] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    deltas: deque[Delta] = field(default_factory=deque)
    """Produced and not yet fetched, of all samples; the last one of each has its output."""
    samples: list[Sequence] = field(default_factory=list)
    """All samples of its request that have started, itself among them."""
    output: Output | None = None
    failure: Exception | None = None
    """Why there will be no output: its own error, or ``RequestAborted``."""

    def __post_init__(self) -> None:
        self.samples.append(self)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.request.prompt.token_ids

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_written(self) -> int:
        """Tokens that have KV once the prefill is done: the last one sampled has none yet."""
        return self.num_prompt + max(0, len(self.output_ids) - 1)

    @property
    def most_slots(self) -> int:
        """Slots of the prompt and its longest answer."""
        return slots_needed(self.num_prompt, self.max_new)

    @property
    def tenant(self) -> str:
        return self.request.tenant or ""

    @property
    def places(self) -> int:
        """Sequences it is, or will be once its samples part."""
        return self.request.samples if self.classes is None else 1

    @property
    def finished(self) -> bool:
        """True if all samples have their output."""
        return len(self.samples) == self.request.samples and all(s.output is not None for s in self.samples)

    @property
    def pending_rows(self) -> int:
        return self.pending[0].num_rows if self.pending else 1

    @property
    def ready(self) -> bool:
        """True unless loads of the next plan are still on their way: who waits for them would hold up all others in a step.

        Alone it doesn't wait until all are there: then each layer waits for its own.
        """
        loads = self.pending[0].loads if self.pending else ()
        return all(load.reader is None or load.reader.arrived for load in loads)

    @property
    def looked_up(self) -> Lookup:
        """The lookup of a running request."""
        if self.lookup is None:
            raise IntegrityError("a sequence runs that was never looked up")
        return self.lookup

    @property
    def found(self) -> Found | None:
        """What the lookup found; None while it isn't done. Raises what it raised."""
        if self.gave_up or self.looking is None or not self.looking.done():
            return None
        return self.looking.result()

    def tier_loads(self) -> dict[str, TierLoad]:
        """What each tier delivered, for the report."""
        loads: dict[str, TierLoad] = {}
        for load in self.loads:
            if (reader := load.reader) is not None:
                old = loads.get(reader.tier, TierLoad(0, 0, 0, 0.0))
                loads[reader.tier] = TierLoad(
                    chunks=old.chunks + 1,
                    tokens=old.tokens + load.tokens.numel(),
                    bytes=old.bytes + reader.bytes_read,
                    load_ms=old.load_ms + reader.load_seconds * 1e3,
                )
        return loads

    def close_readers(self) -> None:
        """What was begun isn't wanted any more; what was found still is."""
        for load in self.loads:
            if load.reader is not None:
                load.reader.close()

    def close_loads(self) -> None:
        """Nothing stored is needed any more: stop what is on its way, give descriptors back."""
        self.close_readers()
        if self.looking is not None:
            self.looking.add_done_callback(_close_found)

    def next_plan(self) -> RequestPlan:
        """The plan of the next step: the next block of the prefill, or one decoded token."""
        return self.pending[0] if self.pending else self.append_plan([self.output_ids[-1]], self.num_written)

    def append_plan(self, token_ids: list[int], order: int) -> RequestPlan:
        """Tokens behind those in front of ``order``, each of which sees everything up to itself."""
        orders = torch.arange(order, order + len(token_ids))
        stop = order + len(token_ids)
        return RequestPlan(
            token_ids=torch.tensor(token_ids),
            positions=orders,
            slots=self.slots[order:stop],
            views=(View(0, len(token_ids), self.slots[:stop], orders + 1),),
            logits=torch.tensor([len(token_ids) - 1]),
        )

    def count(self, result: PlanResult) -> None:
        self.computed += result.rows_per_layer[0] if result.rows_per_layer else 0
        self.charged += result.charged
        if result.recomputed.numel():
            self.recomputed.append(result.recomputed)
        self.deviations += result.deviations
        self.load_wait += result.load_wait

    def forget_counts(self) -> None:
        """The work so far was for nothing (a restart)."""
        self.charged = 0
        self.recomputed.clear()
        self.prompt_logits.clear()
        self.prompt_logprobs.clear()
        self.deviations.clear()
        self.pending.clear()

    def start_over(self) -> None:
        """Back to where it was when it came, except for what it has answered."""
        self.lookup = self.looking = None
        self.gave_up = False
        self.plans = iter(())
        self.computed = 0
        self.forget_counts()

    def note(self, name: str) -> None:
        """Milliseconds since arrival at which something happened; the first time counts."""
        self.times.setdefault(name, (time.perf_counter() - self.arrived) * 1e3)


def _close_found(looking: Future[Found]) -> None:
    if not looking.cancelled() and looking.exception() is None:
        looking.result().close()


def slots_needed(prompt: int, max_new: int) -> int:
    """The last token of an answer is never written."""
    return prompt + max(0, max_new - 1)
