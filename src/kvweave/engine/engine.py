"""The engine: everything is composed here. One step runs one batch of plans.

States of a request: added -> waiting (no slots) -> running: prefill plans, then one row a step -> finished (slots given
back, exact KV left in the prefix tree).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.attention import AttentionBackend
from kvweave.core.plan import split, validate
from kvweave.core.report import Delta, Output, ReuseReport
from kvweave.engine.executor import Executor, PlanResult
from kvweave.engine.lookup import find_reuse, without_hits
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import Lookup, Request, Sequence, slots_needed
from kvweave.engine.text_stream import TextDecoder, TextStream
from kvweave.errors import (
    ContextLengthExceeded,
    IntegrityError,
    InvalidRequest,
    PlanError,
    PromptExceedsPool,
    RequestAborted,
)
from kvweave.index.chunks import ChunkIndex
from kvweave.index.prefix_tree import PrefixTree
from kvweave.kv.allocator import SlotAllocator
from kvweave.kv.pool import KVPool
from kvweave.models.adapter import DecoderAdapter
from kvweave.reuse.base import FallBack
from kvweave.reuse.prefix import Prefix


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of."""

    adapter: DecoderAdapter
    pool: KVPool
    attention: AttentionBackend
    chunks: ChunkIndex
    make_decoder: Callable[[], TextDecoder]
    eos_ids: frozenset[int]
    context_length: int
    prefill_rows: int
    max_step_rows: int
    min_reuse_tokens: int


@dataclass
class Counters:
    """Totals since the engine was made."""

    tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens by class: exact, fused, recomputed, prefilled."""
    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(asked, ran, technique)"""
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(technique, reason)"""
    precomputed_tokens: int = 0


class Engine:
    """Runs requests over one model. Not thread-safe: its caller serialises."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.allocator = SlotAllocator(parts.pool.num_slots)
        self.tree = PrefixTree(self.allocator)
        self.executor = Executor(parts.adapter, parts.pool, parts.attention)
        self.scheduler: Scheduler[Sequence] = Scheduler(parts.max_step_rows)
        self.counters = Counters()

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises as ``check`` does."""
        max_new = self.check(request)
        stream = TextStream(self.parts.make_decoder(), request.params.stop)
        sequence = Sequence(request, stream, max_new)
        self.scheduler.add(sequence)
        return sequence

    def check(self, request: Request) -> int:
        """Tokens its answer may have. Raises ``ContextLengthExceeded``, ``PromptExceedsPool`` if it can never run."""
        n, limit = len(request.prompt.token_ids), self.parts.context_length
        if request.keep_logits > n:
            raise InvalidRequest(f"Logits of {request.keep_logits} tokens are wanted, the prompt has {n}.")
        if n + min(1, request.params.max_tokens) > limit:
            raise ContextLengthExceeded(
                f"The prompt has {n:,} tokens, the limit is {limit:,} (with at least one for the answer). "
                "Shorten it, leave documents out, or raise max_model_len if the model allows it."
            )
        max_new = min(request.params.max_tokens, limit - n)
        slots = slots_needed(n, max_new)
        if slots > self.parts.pool.num_slots:
            raise PromptExceedsPool(
                f"Prompt and answer need {slots:,} slots, the KV pool has {self.parts.pool.num_slots:,}. "
                "Shorten the prompt, lower max_tokens, or use a larger kv_pool."
            )
        return max_new

    def step(self) -> list[Sequence]:
        """Run one batch; returns its sequences. A request's own error ends that request, a failed forward the batch."""
        self.scheduler.admit(self._start)
        batch = self.scheduler.schedule()
        if not batch:
            if self.scheduler.waiting:
                raise IntegrityError("a waiting request can't start although nothing runs")
            return []
        try:
            results = self.executor.run([s.next_plan() for s in batch])
        except BaseException as error:
            for sequence in batch:
                self.abort(sequence, f"another request in its batch failed ({type(error).__name__})")
            raise
        for sequence, result in zip(batch, results, strict=True):
            if sequence.failure is None:  # not aborted while the step ran
                with self._own_errors(sequence):
                    self._advance(sequence, result)
        return batch

    @contextmanager
    def _own_errors(self, sequence: Sequence) -> Iterator[None]:
        """What goes wrong for one request alone (a technique's ``plan``, a broken plan) ends that request alone."""
        try:
            yield
        except Exception as error:
            sequence.failure = error
            self._leave(sequence)
        except BaseException:
            self.abort(sequence)
            raise

    def abort(self, sequence: Sequence, why: str = "it was cancelled") -> None:
        """Stop a request wherever it is and free its slots; whoever waits for it gets ``RequestAborted``."""
        if sequence.output is None and sequence.failure is None:
            sequence.failure = RequestAborted(f"The request was stopped: {why}. Send it again.")
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.allocator.release(sequence.slots)
        sequence.slots = sequence.slots[:0]

    def next_delta(self, sequence: Sequence) -> Delta:
        """The next piece of an answer; runs steps until there is one. Raises ``RequestAborted``."""
        while not sequence.deltas:
            if sequence.failure is not None:
                raise sequence.failure
            self.step()
        return sequence.deltas.popleft()

    def run(self, sequences: list[Sequence]) -> list[Output]:
        """Step until these requests are finished; all of them are freed if anything goes wrong."""
        try:
            for sequence in sequences:
                while sequence.output is None:
                    self.next_delta(sequence)
        except BaseException:
            for sequence in sequences:
                self.abort(sequence)
            raise
        return [s.output for s in sequences if s.output is not None]

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` unless every slot reference belongs to a running request or to the tree."""
        self.allocator.check_integrity()
        held = [s.slots for s in self.scheduler.running] + [self.tree.slots_held()]
        counted = torch.bincount(torch.cat(held), minlength=self.allocator.num_slots)
        owners = torch.from_numpy(self.allocator.owners(torch.arange(self.allocator.num_slots))).long()
        if not torch.equal(counted, owners):
            raise IntegrityError("slot references and their owners disagree")

    def _start(self, sequence: Sequence) -> bool:
        """Reserve slots, look up what is cached and compile the first plan; False if the slots aren't free yet."""
        parts = self.parts
        shared = self._shared_prefix(sequence)
        self.allocator.share(shared)  # before anything is evicted to make room
        fresh = self.reserve(sequence.num_slots - shared.numel())
        if fresh is None:
            self.allocator.release(shared)
            return False
        sequence.slots = torch.cat([shared, fresh])
        sequence.note("queue_ms")
        with self._own_errors(sequence):
            sequence.lookup = find_reuse(
                sequence,
                shared.numel(),
                chunks=parts.chunks,
                layout=parts.pool.layout,
                max_rows=parts.max_step_rows,
                min_reuse_tokens=parts.min_reuse_tokens,
            )
            sequence.note("lookup_ms")
            self._begin(sequence)
        return True

    def reserve(self, n: int) -> Tensor | None:
        """``n`` private slots, evicting prefixes nobody uses if need be; None if running requests hold too many."""
        if n > self.allocator.num_free:
            self.tree.evict(n - self.allocator.num_free)
        return self.allocator.allocate(n)

    def _shared_prefix(self, sequence: Sequence) -> Tensor:
        if sequence.request.technique.reuse == "off":
            return torch.empty(0, dtype=torch.int64)
        computed = max(1, sequence.request.keep_logits)  # tokens that need logits are always computed
        return self.tree.match(sequence.prompt_ids[:-computed], self.parts.chunks.tenant)

    def _begin(self, sequence: Sequence) -> None:
        lookup = _looked_up(sequence)
        sequence.plans = iter(lookup.technique.plan(lookup.plan_request))
        self._next_plan(sequence)

    def _next_plan(self, sequence: Sequence) -> None:
        """Take the next plan of the prefill, if there is one, in blocks."""
        try:
            plan = next(sequence.plans, None)
        except FallBack as doubt:
            self._restart_exact(sequence, doubt.reason)
            return
        if plan is None:
            return
        try:
            validate(plan, self.parts.pool.layout, self.parts.context_length)
            written = torch.cat([plan.slots, *(load.slots for load in plan.loads)])
            if not self.allocator.writable(written):
                raise PlanError("invalid plan: it writes to a shared slot")
        except PlanError as error:
            raise PlanError(f"technique '{_looked_up(sequence).technique.name}': {error}") from error
        sequence.pending.extend(split(plan, self.parts.prefill_rows))

    def _restart_exact(self, sequence: Sequence, reason: str) -> None:
        """Doubt: (re)start on the exact path, over the same slots."""
        lookup = _looked_up(sequence)
        lookup.plan_request = without_hits(lookup.plan_request)
        lookup.technique, lookup.ran, lookup.fallback_reason = Prefix(), "exact", reason
        sequence.forget_counts()
        self._begin(sequence)

    def _advance(self, sequence: Sequence, result: PlanResult) -> None:
        sequence.count(result)
        if not result.finite:
            self._restart_exact(sequence, "high_deviation")
            return
        if sequence.pending:
            sequence.pending.popleft()
            if sequence.request.keep_logits:
                sequence.prompt_logits.append(result.logits)
            if not sequence.pending:
                self._next_plan(sequence)
            if sequence.pending:
                return
            sequence.note("prefill_ms")
            self._publish(sequence, sequence.num_prompt)
        if sequence.max_new == 0:
            self._finish(sequence, "length")
            return
        token, logprob = sequence.sampler.sample(result.logits[-1])
        sequence.note("ttft_ms")
        if logprob is not None:
            sequence.logprobs.append(logprob)
        sequence.output_ids.append(token)
        self._emit(sequence, token)

    def _emit(self, sequence: Sequence, token: int) -> None:
        """Hand out the text of a token and end the answer where it ends. An end-of-text token has no text."""
        params = sequence.request.params
        ends = token in params.stop_token_ids or (token in self.parts.eos_ids and not params.ignore_eos)
        text = "" if ends else sequence.stream.push(token)
        ends = ends or sequence.stream.stopped
        full = len(sequence.output_ids) >= sequence.max_new
        if ends or full:
            text += sequence.stream.flush()
        sequence.deltas.append(Delta(text, token))
        if ends or full:
            self._finish(sequence, "stop" if ends or sequence.stream.stopped else "length")

    def _publish(self, sequence: Sequence, tokens: int) -> None:
        """Exact KV of the first ``tokens`` tokens enters the tree; from the first fused token on nothing is exact."""
        if sequence.request.technique.reuse == "off":
            return
        request = _looked_up(sequence).plan_request
        exact = request.exact_until if request.hits else tokens
        ids = (*sequence.prompt_ids, *sequence.output_ids)[:exact]
        self.tree.insert(ids, sequence.slots[:exact], self.parts.chunks.tenant)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.note("total_ms")
        self._publish(sequence, sequence.num_prompt + max(0, len(sequence.output_ids) - 1))
        self._leave(sequence)  # the tree keeps what was published
        report = self._report(sequence)
        self._count(report)
        sequence.output = Output(
            text=sequence.stream.text,
            token_ids=tuple(sequence.output_ids),
            finish_reason=reason,
            reuse=report,
            prompt_token_ids=sequence.prompt_ids,
            logprobs=tuple(sequence.logprobs) if sequence.request.params.logprobs is not None else None,
        )
        last = sequence.deltas.pop() if sequence.deltas else Delta("", None)
        sequence.deltas.append(Delta(last.text, last.token_id, sequence.output))

    def _report(self, sequence: Sequence) -> ReuseReport:
        lookup = _looked_up(sequence)
        request = lookup.plan_request
        reusable = request.candidates.numel()
        layers = self.parts.pool.layout.num_layers
        times = sequence.times
        report = ReuseReport(
            asked=sequence.request.asked,
            ran=lookup.ran,
            technique=sequence.request.technique.name,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=request.num_cached,
            fused_tokens=reusable - sequence.recomputed,
            recomputed_tokens=sequence.recomputed,
            prefilled_tokens=sequence.num_prompt - request.num_cached - reusable,
            fallback_reason=lookup.fallback_reason,
            ratio=getattr(sequence.request.technique, "ratio", None),
            budget=sequence.charged / (layers * reusable) if reusable else 0.0,
            segments=lookup.segments,
            deviations=tuple(sequence.deviations),
            timings={
                "queue_ms": times["queue_ms"],
                "lookup_ms": times["lookup_ms"] - times["queue_ms"],
                "prefill_ms": times["prefill_ms"] - times["lookup_ms"],
                "ttft_ms": times.get("ttft_ms", times["prefill_ms"]),
                "decode_ms": times["total_ms"] - times.get("ttft_ms", times["total_ms"]),
                "total_ms": times["total_ms"],
            },
        )
        report.check()
        return report

    def _count(self, report: ReuseReport) -> None:
        totals = self.counters
        totals.tokens["exact"] += report.cached_tokens
        totals.tokens["fused"] += report.fused_tokens
        totals.tokens["recomputed"] += report.recomputed_tokens
        totals.tokens["prefilled"] += report.prefilled_tokens
        totals.requests[report.asked, report.ran, report.technique] += 1
        if report.fallback_reason is not None:
            totals.fallbacks[report.technique, report.fallback_reason] += 1


def _looked_up(sequence: Sequence) -> Lookup:
    if sequence.lookup is None:
        raise IntegrityError("a sequence runs that was never looked up")
    return sequence.lookup
