"""Run at every model load: 24 tokens through the plan path against the model's own forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.attention import AttentionBackend
from kvweave.core.keys import ChunkIdentity, ModelFingerprint, Scope
from kvweave.core.plan import Load, RequestPlan, Save, View
from kvweave.engine.executor import Executor
from kvweave.engine.precompute import RecordSink
from kvweave.kv.pool import KVPool
from kvweave.models.adapter import DecoderAdapter
from kvweave.models.conformance import compare, native_layers, recorded_layers
from kvweave.store.base import ChunkRecord

TOKENS = 24


@dataclass(frozen=True)
class SelfCheck:
    """Relative errors found: of a prefill into scattered slots, and of a row behind chunks loaded from storage."""

    prefill_error: float
    load_error: float


def self_check(adapter: DecoderAdapter, attention: AttentionBackend) -> SelfCheck:
    """Raises ``SelfCheckFailed``. Covers layers, masks, write slots, unrotated keys and their rotation on loading."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, adapter.vocab_size, (TOKENS,), generator=generator)
    theirs, logits = native_layers(adapter, ids)
    pool = KVPool(adapter.layout, 2 * TOKENS, adapter.device)
    executor = Executor(adapter, pool, attention)
    scattered = torch.randperm(2 * TOKENS, generator=generator)
    sink = RecordSink(adapter.layout, TOKENS)
    with recorded_layers(adapter) as ours:
        executor.run([_prefill(ids, scattered[:TOKENS], sink)])
    prefill_error = compare(ours, theirs, adapter.layout.dtype, "prefill")
    identity = ChunkIdentity.of(ids.tolist(), (), ModelFingerprint.of(), Scope.of("self-check"))
    record = ChunkRecord(identity, sink.keys, sink.values)
    (result,) = executor.run([_last_row(ids, scattered[TOKENS:], record)])
    load_error = compare(
        [result.logits.float().cpu()], [logits[-1:]], adapter.layout.dtype, "a row behind loaded chunks", "logits"
    )
    return SelfCheck(prefill_error, load_error)


def _prefill(ids: Tensor, slots: Tensor, sink: RecordSink) -> RequestPlan:
    n = ids.numel()
    return RequestPlan(
        token_ids=ids,
        positions=torch.arange(n),
        slots=slots,
        views=(View(0, n, slots, torch.arange(1, n + 1)),),
        logits=torch.arange(n),  # of all rows: a row without logits doesn't attend in the last layer
        saves=(Save(0, n, sink),),
    )


def _last_row(ids: Tensor, slots: Tensor, record: ChunkRecord) -> RequestPlan:
    """The last token as a row, everything in front of it loaded from the record in two pieces."""
    n, half = ids.numel(), ids.numel() // 2
    loads = tuple(Load(record, at, slots[at], at, at) for at in (torch.arange(0, half), torch.arange(half, n - 1)))
    return RequestPlan(
        token_ids=ids[-1:],
        positions=torch.tensor([n - 1]),
        slots=slots[-1:],
        views=(View(0, 1, slots, torch.tensor([n])),),
        logits=torch.tensor([0]),
        loads=loads,
    )
