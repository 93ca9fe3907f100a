"""The engine: everything is composed here. One step runs one batch of plans.

States of a request: added -> waiting (no slots) -> running: prefill plans, then one row a step -> finished (slots given
back, exact KV left in the prefix tree). A running one may be preempted: it waits again and goes on where it was.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvweave.core.plan import RequestPlan
from kvweave.core.report import Delta, Output
from kvweave.engine.accounting import Counters, classify, make_report, note_loads
from kvweave.engine.admission import Admission, namespace
from kvweave.engine.executor import Executor, PlanResult
from kvweave.engine.parts import EngineParts
from kvweave.engine.prefill import Prefills, orders_published
from kvweave.engine.profile import Profile
from kvweave.engine.sampler import Sampler
from kvweave.engine.scheduler import Scheduler, Verdict
from kvweave.engine.sequence import Request, Sequence, slots_needed
from kvweave.engine.text_stream import TextStream
from kvweave.errors import (
    ContextLengthExceeded,
    IntegrityError,
    InvalidRequest,
    PromptExceedsPool,
    RequestAborted,
)
from kvweave.store.base import EraseReceipt

_POLL = 1.0  # seconds: a lookup's time may be over although nothing happened


class Engine:
    """Runs requests over one model. Not thread-safe: ``EngineLoop`` gives it a thread of its own."""

    def __init__(self, parts: EngineParts, profile: Profile | None = None) -> None:
        self.parts = parts
        self.profile = profile or Profile()
        self.counters = Counters()
        self.activity = threading.Event()
        """Set when something happened that a step could go on with."""
        self.scheduler: Scheduler[Sequence] = Scheduler(parts.max_step_rows, parts.max_sequences)
        self.admission = Admission(parts, self.scheduler, self.profile, self.counters, self.activity)
        self.allocator, self.tree = self.admission.allocator, self.admission.tree
        self.prefills = Prefills(parts, self.allocator, self.profile, self.counters)
        self.executor = Executor(parts.adapter, parts.pool, parts.attention)
        self._closed = False
        self._pid = os.getpid()

    def reconfigure(self, **changes: Any) -> None:
        """Exchange parts (fields of ``EngineParts`` other than adapter, pool and attention) between two steps."""
        self.parts = self.admission.parts = self.prefills.parts = replace(self.parts, **changes)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises as ``check`` does."""
        sequence = self.prepare(request)
        self.enqueue(sequence)
        return sequence

    def prepare(self, request: Request) -> Sequence:
        """A sequence that isn't queued yet; the one method that any thread may call. Raises as ``check`` does."""
        self.check_open()
        return self._sequence(request, self.check(request), 0)

    def enqueue(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self.admission.look_ahead(self.scheduler.waiting)

    def _sequence(self, request: Request, max_new: int, index: int) -> Sequence:
        params = request.params
        if index and params.seed is not None:
            params = replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)
        stream = TextStream(
            self.parts.make_decoder(params.skip_special_tokens),
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        constraint = None if request.constraint is None else request.constraint()
        sampler = Sampler(params, request.prompt.token_ids, self.parts.eos_ids, constraint)
        return Sequence(request, stream, max_new, sampler, index)

    def check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("This engine was closed. Make a new LLM.")
        if self._pid != os.getpid():
            raise InvalidRequest("This process was forked from the one that made the LLM. Make a new LLM in each process.")

    def close(self) -> None:
        """Stop what runs, forget the exact prefixes, write what is queued to the tiers."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(sequence, "the engine was closed")
        self._closed = True
        self.admission.close()
        self.parts.chunks.store.close()
        self.profile.save()

    def erase(self, tenant: str | None = None) -> EraseReceipt:
        """Erase all that a tenant stored, in every tier; what it is running goes on with what it has."""
        receipt = self.parts.chunks.store.erase(self.parts.chunks.tenant if tenant is None else tenant)
        self.forget(receipt.scope)
        return receipt

    def forget(self, tag: str) -> int:
        """Drop the exact prefixes of the tenant with this scope tag (hex), under all salts; returns the number of tokens."""
        return self.tree.clear(f"{tag}/")

    def check(self, request: Request) -> int:
        """Tokens its answer may have. Raises ``ContextLengthExceeded``, ``PromptExceedsPool`` if it can never run."""
        n, limit, pool = len(request.prompt.token_ids), self.parts.context_length, self.parts.pool.num_slots
        if (largest := max(request.params.logit_bias, default=0)) >= self.parts.adapter.vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {largest:,}; this model has {self.parts.adapter.vocab_size:,}.", param="logit_bias"
            )
        if request.keep_logits > n:
            raise InvalidRequest(f"Logits of {request.keep_logits} tokens are wanted, the prompt has {n}.")
        if n + min(1, request.params.max_tokens) > limit:
            raise ContextLengthExceeded(
                f"The prompt has {n:,} tokens, the limit is {limit:,} (with at least one for the answer). "
                "Shorten it, leave documents out, or raise max_model_len if the model allows it."
            )
        max_new = min(request.params.max_tokens, limit - n)
        if request.params.max_tokens > limit - n and n < pool:  # whoever asks for all there is gets all there is
            max_new = min(max_new, pool - n + 1)
        slots = slots_needed(n, max_new)
        if slots > pool:
            raise PromptExceedsPool(
                f"Prompt and answer need {slots:,} slots, the KV pool has {pool:,}. "
                "Shorten the prompt, lower max_tokens, or use a larger kv_pool."
            )
        return max_new

    def step(self) -> list[Sequence]:
        """Run one batch; returns its sequences. A request's own error ends that request, a failed forward the batch."""
        self.admission.look_ahead(self.scheduler.waiting)
        self.scheduler.admit(self._start)
        self._make_room()
        batch = self.scheduler.schedule()
        for sequence, result in zip(batch, self._run(batch), strict=True):
            self._advance(sequence, result)
        return batch

    def _start(self, sequence: Sequence) -> Verdict:
        with self._own_errors(sequence):
            resumed = sequence.swapped is not None
            verdict = self.admission.start(sequence)
            if verdict is Verdict.STARTED and not resumed:
                self.prefills.begin(sequence)
            if verdict is Verdict.NO_ROOM and not self.scheduler.running:
                raise IntegrityError("a waiting request can't start although nothing runs")
            return verdict
        return Verdict.GONE

    def _make_room(self) -> None:
        """For the next token of everyone who decodes."""
        for sequence in list(self.scheduler.running):
            if not sequence.pending:
                self.admission.grow(sequence)

    def _run(self, batch: list[Sequence]) -> list[PlanResult]:
        if not batch:
            return []
        try:
            plans = [s.next_plan() for s in batch]
            start = time.perf_counter()
            results = self.executor.run(plans)
            self._note_prefill(plans, start)
        except BaseException as error:
            for sequence in batch:
                self.abort(sequence, f"another request in its batch failed ({type(error).__name__})")
            raise
        return results

    def _note_prefill(self, plans: list[RequestPlan], start: float) -> None:
        """A forward that computed all rows of one plan in all layers, and did nothing else, tells what that costs."""
        if len(plans) == 1 and not plans[0].steps and not plans[0].loads and not plans[0].saves:
            if self.parts.pool.device.type == "cuda":
                torch.cuda.synchronize(self.parts.pool.device)
            seconds = time.perf_counter() - start
            self.profile.note_prefill(plans[0].num_rows, int(plans[0].positions[-1]) + 1, seconds)

    @contextmanager
    def _own_errors(self, sequence: Sequence) -> Iterator[None]:
        """What goes wrong for one request alone (a technique's ``plan``, a broken plan) ends that request alone."""
        try:
            yield
        except Exception as error:
            self._fail(sequence, error)
        except BaseException:
            self.abort(sequence)
            raise

    def abort(self, sequence: Sequence, why: str = "it was cancelled") -> None:
        """Stop a request wherever it is and free its slots; whoever waits for it gets ``RequestAborted``."""
        self._fail(sequence, RequestAborted(f"The request was stopped: {why}. Send it again."))

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """One sample's end is the end of all that aren't finished."""
        for sample in sequence.samples:
            if sample.output is None and sample.failure is None:
                sample.failure = error
            self._leave(sample)

    def _leave(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.admission.leave(sequence)

    def next_delta(self, sequence: Sequence) -> Delta:
        """The next piece of an answer; runs steps until there is one. Raises ``RequestAborted``."""
        while not sequence.deltas:
            if sequence.failure is not None:
                raise sequence.failure
            self.activity.clear()
            if not self.step():
                self.activity.wait(_POLL)
        return sequence.deltas.popleft()

    def run(self, sequences: list[Sequence]) -> list[Output]:
        """Step until these requests are finished; all of them are freed if anything goes wrong. One output a sample."""
        try:
            for sequence in sequences:
                while not sequence.finished:
                    self.next_delta(sequence)
        except BaseException:
            for sequence in sequences:
                self.abort(sequence)
            raise
        return [sample.output for s in sequences for sample in s.samples if sample.output is not None]

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` unless all slots and all swapped KV have the owners they should have."""
        self.admission.check_integrity()

    def _advance(self, sequence: Sequence, result: PlanResult) -> None:
        if sequence.failure is not None:  # aborted while the step ran
            return
        with self._own_errors(sequence):
            sequence.count(result)
            if not sequence.pending:
                self._sample(sequence, result)
            elif self.prefills.advance(sequence, result):
                self._end_prefill(sequence, result)

    def _end_prefill(self, sequence: Sequence, result: PlanResult) -> None:
        sequence.close_loads()  # an answer may be long, and others want the room
        if sequence.classes is not None:  # it was preempted: what it answered last is computed next
            return
        sequence.note("prefill_ms")
        exact, new = self._publish(sequence, sequence.num_prompt)
        published = sum(1 for _ in orders_published(sequence, new, exact))
        sequence.classes = classify(sequence, published)
        for sample in [sequence, *self._fork(sequence)]:
            if sample.max_new == 0:
                self._finish(sample, "length", Delta("", None, index=sample.index))
            else:
                self._sample(sample, result)

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The other samples of its request: they share the slots of its prompt."""
        others = []
        for index in range(1, sequence.request.samples):
            sample = self._sequence(sequence.request, sequence.max_new, index)
            sample.arrived, sample.times = sequence.arrived, dict(sequence.times)
            sample.lookup, sample.looking, sample.gave_up = sequence.lookup, sequence.looking, sequence.gave_up
            sample.classes, sample.loads, sample.load_wait = sequence.classes, sequence.loads, sequence.load_wait
            sample.deviations, sample.prompt_logprobs = sequence.deviations, sequence.prompt_logprobs
            sample.slots = sequence.slots[: sequence.num_prompt].clone()
            self.allocator.share(sample.slots)
            sample.deltas, sample.samples = sequence.deltas, sequence.samples
            sequence.samples.append(sample)
            self.scheduler.join(sample)
            others.append(sample)
        return others

    def _sample(self, sequence: Sequence, result: PlanResult) -> None:
        token, logprob = sequence.sampler.sample(result.logits[-1])
        sequence.note("ttft_ms")
        if logprob is not None:
            sequence.logprobs.append(logprob)
        sequence.output_ids.append(token)
        params = sequence.request.params
        ends = token in params.stop_token_ids or (token in self.parts.eos_ids and not params.ignore_eos)
        text = "" if ends else sequence.stream.push(token)  # an end-of-text token has no text
        ends = ends or sequence.stream.stopped or sequence.sampler.finished
        full = len(sequence.output_ids) >= sequence.max_new
        if ends or full:
            text += sequence.stream.flush()
        delta = Delta(text, token, None, sequence.index, logprob)
        if ends or full:
            self._finish(sequence, "stop" if ends or sequence.stream.stopped else "length", delta)
        else:
            sequence.deltas.append(delta)

    def _publish(self, sequence: Sequence, tokens: int) -> tuple[int, int]:
        """Exact KV of the first ``tokens`` tokens enters the tree; from the first fused token on nothing is exact.

        Returns how many tokens are exact, and how many of them the tree didn't have.
        """
        request = sequence.looked_up.plan_request
        exact = request.exact_until if request.hits else tokens
        found = sequence.found
        if found is None or not sequence.request.publish or not self.parts.chunks.store.current(found.scope):
            return exact, 0
        ids = (*sequence.prompt_ids, *sequence.output_ids)[:exact]
        ttl = sequence.request.ttl
        expires = math.inf if ttl is None else time.time() + ttl
        return exact, self.tree.insert(ids, sequence.slots[:exact], namespace(found.scope), expires)

    def _finish(self, sequence: Sequence, reason: str, last: Delta) -> None:
        sequence.note("total_ms")
        store, layout = self.parts.chunks.store, self.parts.pool.layout
        if not sequence.restarts and not sequence.index:
            note_loads(sequence.loads, self.profile, layout, store.io_threads)
        self._publish(sequence, sequence.num_written)
        self._leave(sequence)  # the tree keeps what was published
        report = make_report(sequence, layout.num_layers)
        if sequence.request.internal:
            self.counters.precomputed_tokens += sequence.num_prompt
        elif not sequence.index:  # the prompt of several samples is one
            self.counters.count(report)
        self.counters.generated_tokens += len(sequence.output_ids)
        params = sequence.request.params
        wanted = sequence.request.prompt_logprobs is not None
        sequence.output = Output(
            text=sequence.stream.text,
            token_ids=tuple(sequence.output_ids),
            finish_reason=reason,
            reuse=report,
            prompt_token_ids=sequence.prompt_ids,
            logprobs=tuple(sequence.logprobs) if params.logprobs is not None else None,
            prompt_logprobs=tuple(map(sequence.prompt_logprobs.get, range(sequence.num_prompt))) if wanted else None,
            index=sequence.index,
        )
        sequence.deltas.append(replace(last, output=sequence.output))
