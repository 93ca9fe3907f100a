"""The engine: everything is composed here. One step runs one batch of plans.

States of a request: added -> waiting (no slots) -> running: prefill plans, then one row a step -> finished (slots given
back, exact KV left in the prefix tree).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvweave.attention import AttentionBackend
from kvweave.core.keys import Scope
from kvweave.core.plan import Load, RequestPlan, split, validate
from kvweave.core.report import Delta, Output
from kvweave.engine.accounting import Counters, make_report, note_loads
from kvweave.engine.executor import Executor, PlanResult
from kvweave.engine.lookup import find_reuse, without
from kvweave.engine.profile import Profile
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
from kvweave.reuse.controller import Policy, decide
from kvweave.reuse.prefix import Prefix
from kvweave.store.base import DAMAGED, EraseReceipt

_LOOKUP_THREADS = 2
_LOOK_AHEAD = 16  # waiting requests whose chunks are looked up in advance
_LEAST_TIMEOUT = 0.05  # seconds: below that, a busy scheduler would be taken for a slow tier
_PROBE = 20  # one of so many requests for which loading was expected to lose loads all the same
_RESTARTS = 2  # single records that may fail in one request before all of their tier is given up for it


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
    controller: Policy | None = None
    """How the recompute ratio follows the rates of tiers below host memory; None: it doesn't."""
    load_timeout: float = 10.0
    """Seconds a load may take where nothing better is known."""


class Engine:
    """Runs requests over one model. Not thread-safe: its caller serialises."""

    def __init__(self, parts: EngineParts, profile: Profile | None = None) -> None:
        self.parts = parts
        self.profile = profile or Profile()
        self.allocator = SlotAllocator(parts.pool.num_slots)
        self.tree = PrefixTree(self.allocator)
        self.executor = Executor(parts.adapter, parts.pool, parts.attention)
        self.scheduler: Scheduler[Sequence] = Scheduler(parts.max_step_rows)
        self.counters = Counters()
        self._closed = False
        self._no_room: Sequence | None = None
        """The waiting request that this step had no slots for."""
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="kvweave-lookup")
        self._tickets = itertools.count(1)
        self._declined = itertools.count(1)
        self._pid = os.getpid()

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises as ``check`` does."""
        self.check_open()
        max_new = self.check(request)
        stream = TextStream(self.parts.make_decoder(), request.params.stop)
        sequence = Sequence(request, stream, max_new)
        self.scheduler.add(sequence)
        self._look_ahead()
        return sequence

    def _look_ahead(self) -> None:
        """Lookups of the first requests in line; not of all, because what is found holds descriptors."""
        for sequence in itertools.islice(self.scheduler.waiting, _LOOK_AHEAD):
            if sequence.looking is None and sequence.request.technique.reuse != "off":
                self._look_up(sequence)

    def _look_up(self, sequence: Sequence) -> None:
        """Ask the caches, on another thread if a tier may be slow; the request isn't admitted before they answered."""
        request, chunks = sequence.request, self.parts.chunks
        if not chunks.store.immediate:
            sequence.looking = self._lookups.submit(chunks.lookup, request.prompt, request.anchors)
            return
        sequence.looking = Future()
        try:
            sequence.looking.set_result(chunks.lookup(request.prompt, request.anchors))
        except Exception as error:  # this request's own, like one on the other threads
            sequence.looking.set_exception(error)

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
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self.tree.clear_all()
        self.parts.chunks.store.close()
        self.profile.save()

    def erase(self) -> EraseReceipt:
        """Erase all that the tenant stored, in every tier; what he is running goes on with what it has."""
        self.tree.clear(self._namespace(self.parts.chunks.scope()))
        return self.parts.chunks.store.erase(self.parts.chunks.tenant)

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
        self._no_room = None
        self._look_ahead()
        self.scheduler.admit(self._start)
        batch = self.scheduler.schedule()
        if not batch:
            self._wait_for_lookup()
            return []
        try:
            plans = [s.next_plan() for s in batch]
            start = time.perf_counter()
            results = self.executor.run(plans)
            self._note_prefill(plans, time.perf_counter() - start)
        except BaseException as error:
            for sequence in batch:
                self.abort(sequence, f"another request in its batch failed ({type(error).__name__})")
            raise
        for sequence, result in zip(batch, results, strict=True):
            if sequence.failure is None:  # not aborted while the step ran
                with self._own_errors(sequence):
                    self._advance(sequence, result)
        return batch

    def _note_prefill(self, plans: list[RequestPlan], seconds: float) -> None:
        """A forward that computed all rows of one plan in all layers, and waited for nothing, tells what that costs."""
        if len(plans) == 1 and not plans[0].steps and not plans[0].loads:
            self.profile.note_prefill(plans[0].num_rows, int(plans[0].positions[-1]) + 1, seconds)

    def _wait_for_lookup(self) -> None:
        """Nothing runs: the request that is first in line waits for the caches' answer, which has a deadline of its own."""
        first = next(iter(self.scheduler.waiting), None)
        if first is None:
            return
        if first is self._no_room or first.looking is None:  # not even a lookup to wait for
            raise IntegrityError("a waiting request can't start although nothing runs")
        wait([first.looking])

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
        sequence.close_loads()

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
        """Reserve slots, look up what is cached and compile the first plan; False if that isn't possible yet."""
        with self._own_errors(sequence):
            if not self._answered(sequence):
                return False
            shared = self._shared_prefix(sequence)
            self.allocator.share(shared)  # before anything is evicted to make room
            fresh = self.reserve(sequence.num_slots - shared.numel())
            if fresh is None:
                self.allocator.release(shared)
                self._no_room = sequence
                return False
            sequence.slots = torch.cat([shared, fresh])
            sequence.note("queue_ms")
            parts = self.parts
            sequence.lookup = find_reuse(
                sequence,
                shared.numel(),
                sequence.found,
                layout=parts.pool.layout,
                max_rows=parts.max_step_rows,
                min_reuse_tokens=parts.min_reuse_tokens,
            )
            self._control(sequence.lookup)
            sequence.note("lookup_ms")
            self._begin(sequence)
        return True

    def _answered(self, sequence: Sequence) -> bool:
        """True if the caches have answered; again, if the tenant was erased while the request waited."""
        if sequence.found is not None and not self.parts.chunks.store.current(sequence.found.scope):
            sequence.found.close()
            self._look_up(sequence)
        return sequence.request.technique.reuse == "off" or sequence.found is not None

    def _control(self, lookup: Lookup) -> None:
        """Let the controller set the ratio, or decline loads that would lose."""
        costs = self.profile.costs() if self.parts.controller is not None and lookup.ran == "fused" else None
        if costs is None or self.parts.controller is None:
            return
        decided = decide(self.parts.controller, lookup.technique, lookup.plan_request, costs)
        if decided is None:
            return
        lookup.technique, lookup.decision = decided
        probe = lookup.decision.run == "exact" and next(self._declined) % _PROBE == 0  # the tier may have got better
        if lookup.decision.run == "exact" and not probe:
            lookup.plan_request = replace(lookup.plan_request, hits=())
            lookup.technique, lookup.ran, lookup.fallback_reason = Prefix(), "exact", "no_gain"

    def reserve(self, n: int) -> Tensor | None:
        """``n`` private slots, evicting prefixes nobody uses if need be; None if running requests hold too many."""
        if n > self.allocator.num_free:
            self.tree.evict(n - self.allocator.num_free)
        return self.allocator.allocate(n)

    def _shared_prefix(self, sequence: Sequence) -> Tensor:
        if sequence.found is None:
            return torch.empty(0, dtype=torch.int64)
        computed = max(1, sequence.request.keep_logits)  # tokens that need logits are always computed
        return self.tree.match(sequence.prompt_ids[:-computed], self._namespace(sequence.found.scope))

    @staticmethod
    def _namespace(scope: Scope) -> str:
        """Of the prefix tree: the tenant's key, so that an erasure changes it."""
        return scope.key.hex()

    def _begin(self, sequence: Sequence) -> None:
        lookup = sequence.looked_up
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
            raise PlanError(f"technique '{sequence.looked_up.technique.name}': {error}") from error
        ticket, timeout = next(self._tickets), self._load_timeout(sequence.looked_up)
        plan = replace(plan, loads=tuple(load.begin(ticket, timeout) for load in plan.loads))
        sequence.loads.extend(plan.loads)
        sequence.pending.extend(split(plan, self.parts.prefill_rows))

    def _load_timeout(self, lookup: Lookup) -> float:
        """Seconds after which a load is given up: half as long again as expected, and a tenth of computing everything."""
        decision = lookup.decision
        if decision is None:
            return self.parts.load_timeout
        expected = 1.5 * decision.load_ms + 0.1 * decision.predicted_full_ms
        return min(self.parts.load_timeout, _LEAST_TIMEOUT + expected / 1e3)

    def _restart_without(self, sequence: Sequence, lost: Load, reason: str) -> None:
        """A load failed: its chunk is computed instead. What is left may still be worth its technique."""
        lookup, request = sequence.looked_up, sequence.looked_up.plan_request
        sequence.restarts += 1
        tier = "" if lost.reader is None else lost.reader.tier
        broken = [h for h in (*request.exact_hits, *request.hits) if h.start <= int(lost.positions[0]) < h.stop]
        if reason not in DAMAGED or sequence.restarts > _RESTARTS:  # not one record is bad but its medium
            broken += [h for h in (*request.exact_hits, *request.hits) if h.tier == tier]
        if reason == "deadline" and lost.reader is not None and lost.reader.jobs:  # so slow is a rate as well
            note_loads([lost], self.profile, self.parts.pool.layout, 1, at_least=self._load_timeout(lookup))
        sequence.close_readers()
        lookup.lose(without(request, {h.start for h in broken}), broken, reason)
        self.counters.lost_loads[tier, reason] += 1
        if lookup.ran == "fused" and sum(h.length for h in lookup.plan_request.hits) < max(1, self.parts.min_reuse_tokens):
            self._restart_exact(sequence, "load_timeout" if reason == "deadline" else "bad_record")
            return
        sequence.forget_counts()
        self._begin(sequence)

    def _restart_exact(self, sequence: Sequence, reason: str) -> None:
        """Doubt: (re)start on the exact path, over the same slots."""
        lookup = sequence.looked_up
        lookup.plan_request = replace(lookup.plan_request, hits=())
        lookup.technique, lookup.ran, lookup.fallback_reason = Prefix(), "exact", reason
        sequence.close_readers()
        sequence.forget_counts()
        self._begin(sequence)

    def _advance(self, sequence: Sequence, result: PlanResult) -> None:
        sequence.count(result)
        if result.lost is not None:
            self._restart_without(sequence, result.lost, result.lost_reason)
            return
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
            sequence.close_loads()  # an answer may be long, and others want the room
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
        if sequence.found is None:
            return
        request = sequence.looked_up.plan_request
        exact = request.exact_until if request.hits else tokens
        ids = (*sequence.prompt_ids, *sequence.output_ids)[:exact]
        self.tree.insert(ids, sequence.slots[:exact], self._namespace(sequence.found.scope))

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.note("total_ms")
        store, layout = self.parts.chunks.store, self.parts.pool.layout
        if not sequence.restarts:
            note_loads(sequence.loads, self.profile, layout, store.io_threads)
        self._publish(sequence, sequence.num_prompt + max(0, len(sequence.output_ids) - 1))
        self._leave(sequence)  # the tree keeps what was published
        report = make_report(sequence, layout.num_layers)
        self.counters.count(report)
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
