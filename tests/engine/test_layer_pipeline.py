"""Loads of many jobs a record: layers arrive one by one while others compute. Bit for bit what one job gives."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from kvweave.kv.pool import SlotIndex
from kvweave.store.memory_blobs import MemoryBlobs
from kvweave.store.tiered import TierOptions
from tests.engine.test_tiered_loads import filled, in_memory
from tests.lab import BOS, standard
from tests.store.media import FaultyBlobs

LAYERS = TierOptions(least_job=1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("technique", ["naive", "epic:ratio=0.3", "cacheblend:ratio=0.3", "question:ratio=0.3"])
def test_layer_by_layer_is_bit_for_bit_what_memory_gives(technique: str, family: str) -> None:
    documents, prompt = standard()
    near = in_memory(documents, family).run(prompt, technique, max_tokens=3)
    lab = filled(MemoryBlobs(), documents, family=family, options=LAYERS)
    far = lab.run(prompt, technique, max_tokens=3)
    assert torch.equal(near.logits, far.logits)
    assert near.token_ids == far.token_ids
    assert (far.report.ran == "fused") == ("memory" in far.report.loads)
    assert far.report.ran == near.report.ran


def test_each_layer_waits_for_its_own_rows_alone() -> None:
    """The last read waits until the first layer has been computed: were they one job, this would never end."""
    documents, prompt = standard()
    medium = FaultyBlobs(MemoryBlobs())
    lab = filled(medium, documents, options=LAYERS)
    computed, reads, lock = threading.Event(), [0], threading.Lock()
    write = lab.engine.parts.pool.write
    chunks = sum(len(lab.engine.parts.chunks.pieces(d, (BOS,))) for d in documents)
    last = chunks * (1 + lab.model.layout.num_layers)  # a header and every layer

    def note_write(layer: int, index: SlotIndex, keys: Tensor, values: Tensor) -> None:
        write(layer, index, keys, values)
        computed.set()

    def hold_the_last(operation: str) -> None:
        with lock:
            reads[0] += operation == "read"
            waits = reads[0] == last
        assert not waits or computed.wait(30)

    lab.engine.parts.pool.write = note_write  # type: ignore[method-assign]
    medium.choose = hold_the_last  # type: ignore[assignment]
    result = lab.run(prompt, "naive")
    assert reads[0] == last
    assert result.report.ran == "fused"


def test_a_job_that_fails_in_the_middle_costs_its_chunk_alone() -> None:
    documents, prompt = standard()
    medium = FaultyBlobs(MemoryBlobs())
    lab = filled(medium, documents, options=LAYERS)
    failed: list[str] = []

    def fail_once(operation: str) -> str | None:
        failed.append(operation)
        return "flip" if operation == "read" and len([f for f in failed if f == "read"]) == 9 else None

    medium.choose = fail_once  # type: ignore[assignment]
    result = lab.run(prompt, "epic:k=4")
    assert result.report.ran == "fused"
    assert [s.reason for s in result.report.segments].count("checksum") == 1
    assert lab.store.staging.used == 0
