"""Media that make one request wait must not make the others wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvweave.reuse.controller import Costs
from kvweave.store.memory_blobs import MemoryBlobs
from tests.engine.test_tiered_loads import HEADERS, TieredLab, filled
from tests.lab import BOS, close, doc, prompt_of, standard
from tests.store.media import Fault, FaultyBlobs

WAIT = 30


class Gate:
    """Calls of one operation stand still, from the n-th on, until the gate opens."""

    def __init__(self, operation: str, after: int = 0) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self._operation, self._left, self._lock = operation, after, threading.Lock()

    def __call__(self, operation: str) -> Fault:
        if operation == self._operation:
            with self._lock:
                self._left -= 1
                stands = self._left < 0
            if stands:
                self.reached.set()
                self.opened.wait(WAIT)
        return None


@pytest.fixture
def stuck() -> Iterator[tuple[TieredLab, FaultyBlobs]]:
    documents, _ = standard()
    medium = FaultyBlobs(MemoryBlobs())
    yield filled(medium, documents), medium
    if isinstance(medium.choose, Gate):
        medium.choose.opened.set()


def test_a_load_that_stops_half_way_holds_up_nobody(stuck: tuple[TieredLab, FaultyBlobs]) -> None:
    lab, medium = stuck
    _, prompt = standard()
    medium.choose = gate = Gate("read", after=HEADERS + 1)  # the first chunk arrives, the second never does
    late = lab.add(prompt, "epic:k=4")
    quick = [lab.add(prompt_of([BOS, 4], doc(9, i)), "full", max_tokens=20) for i in range(3)]
    while not gate.reached.is_set():
        lab.engine.step()
    lab.engine.run(quick)
    assert late.output is None
    assert late.failure is None
    gate.opened.set()
    lab.engine.run([late])
    assert late.output is not None
    assert late.output.reuse.ran == "fused"


def test_a_lookup_that_hangs_is_overtaken(stuck: tuple[TieredLab, FaultyBlobs]) -> None:
    lab, medium = stuck
    _, prompt = standard()
    medium.choose = gate = Gate("open")
    late = lab.add(prompt, "epic:k=4")
    quick = [lab.add(prompt_of([BOS, 4], doc(9, i)), "prefix", max_tokens=3) for i in range(3)]
    lab.engine.run(quick)
    assert late in lab.engine.scheduler.waiting
    gate.opened.set()
    lab.engine.run([late])
    assert late.output is not None
    assert late.output.reuse.ran == "fused"


def test_a_lookup_that_never_ends_costs_its_deadline_and_no_more(stuck: tuple[TieredLab, FaultyBlobs]) -> None:
    lab, medium = stuck
    _, prompt = standard()
    lab.engine.reconfigure(lookup_timeout=0.2)
    medium.choose = gate = Gate("open")
    sequence = lab.add(prompt, "epic:k=4", keep=2)
    lab.engine.run([sequence])
    result = lab.result(sequence)
    assert (result.report.ran, result.report.fallback_reason) == ("exact", "load_timeout")
    assert close(result.logits, lab.native(prompt)[-2:])
    assert lab.engine.tree.num_tokens == 0, "nobody knows whether the tenant was erased"
    gate.opened.set()
    assert lab.store.flush(WAIT)
    lab.engine.check_integrity()


def test_exact_chunks_are_not_loaded_where_computing_them_is_faster() -> None:
    documents, _ = standard()
    lab = filled(MemoryBlobs(), documents)
    lab.engine.reconfigure(controller="auto")
    prompt = prompt_of([BOS], ("doc", documents[0]), doc(9, 1))
    for rate, cached in ((1e12, len(documents[0])), (1e3, 0)):
        lab.forget_prefixes()
        lab.engine.profile.costs = lambda rate=rate: Costs(lambda rows, keys: 1e-3 * rows, {"memory": rate})  # type: ignore[method-assign, misc]
        result = lab.run(prompt, "prefix", keep=2)
        assert result.report.cached_tokens == cached
        assert (result.report.fallback_reason == "no_gain") == (not cached)
        assert close(result.logits, lab.native(prompt)[-2:])
