"""Chunks that lie on a medium: loads layer by layer, what a failing one costs, and what the report says of it."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.engine.profile import Profile
from kvweave.engine.sequence import Sequence as Running
from kvweave.index.chunks import Found
from kvweave.reuse.controller import Costs
from kvweave.store.base import Blobs
from kvweave.store.host import HostStore
from kvweave.store.memory_blobs import MemoryBlobs
from kvweave.store.record import GROUP
from kvweave.store.tiered import TieredStore, TierOptions
from tests.lab import BOS, Lab, close, doc, prompt_of, standard
from tests.matrix import FAMILIES
from tests.store.media import Fault, FaultyBlobs, RecordingBlobs, always

TECHNIQUES = ("naive", "epic:k=4", "epic:ratio=0.3", "random:ratio=0.3", "cacheblend:ratio=0.3", "question:ratio=0.3")


@dataclass
class TieredLab(Lab):
    """An engine whose chunks never stay in host memory (unless ``host`` bytes say so)."""

    medium: Blobs | None = None
    host: int = 0
    options: TierOptions | None = None

    def make_store(self) -> TieredStore:
        medium = self.medium or MemoryBlobs()
        return TieredStore(HostStore(self.host), [medium], layout=self.model.layout, options=self.options or TierOptions())


def filled(medium: Blobs, documents: list[list[int]], **changes: object) -> TieredLab:
    lab = TieredLab(medium=medium, **changes)  # type: ignore[arg-type]
    lab.precompute(*documents)
    assert lab.store.flush(10)
    return lab


def in_memory(documents: list[list[int]], family: str = "llama") -> Lab:
    lab = Lab(family)
    lab.precompute(*documents)
    return lab


@pytest.mark.parametrize(
    ("technique", "family"),
    [*(("naive", family) for family in FAMILIES), *((t, family) for t in TECHNIQUES[1:] for family in ("llama", "gpt_oss"))],
)
def test_bit_for_bit_what_memory_gives(technique: str, family: str) -> None:
    """Public failure 6: every family's layers come back whole, and nothing of them is lost on the way."""
    documents, prompt = standard()
    near, far = in_memory(documents, family), filled(MemoryBlobs(), documents, family=family)
    a, b = near.run(prompt, technique, max_tokens=3), far.run(prompt, technique, max_tokens=3)
    assert torch.equal(a.logits, b.logits)
    assert all(torch.equal(x, y) for x, y in zip([*a.keys, *a.values], [*b.keys, *b.values], strict=True))
    assert a.token_ids == b.token_ids
    assert a.report.ran == b.report.ran
    if a.report.ran == "fused":
        assert list(b.report.loads) == ["memory"]
        assert {s.tiers for s in b.report.segments} == {("memory",)}


def test_rows_that_are_recomputed_are_not_read() -> None:
    """One contiguous read a layer, of the rows that are kept, rounded up to a group."""
    documents = [doc(96, 1), doc(96, 2)]
    prompt = prompt_of([BOS, 5], *(("doc", d) for d in documents), doc(7, 3))
    medium = RecordingBlobs(MemoryBlobs())
    lab = filled(medium, documents, chunking=replace(Lab().chunking, size=96))
    layers, row = lab.model.layout.num_layers, lab.model.layout.bytes_per_token // lab.model.layout.num_layers
    for ratio in (0.15, 0.3, 0.5):
        medium.calls.clear()
        lab.forget_prefixes()
        report = lab.run(prompt, f"epic:ratio={ratio}").report
        computed = math.ceil(math.ceil(ratio * 192) / 2)  # of each chunk: its first tokens
        rows = 96 - computed // GROUP * GROUP
        sections = [c for c in medium.of("read") if c.offset]
        assert len(sections) == layers * len(documents)
        assert {c.bytes for c in sections} == {rows * row}
        assert report.loads["memory"].bytes == layers * len(documents) * rows * row


def test_nothing_is_read_below_the_check_layer() -> None:
    documents, prompt = standard()
    medium = RecordingBlobs(MemoryBlobs())
    lab = filled(medium, documents)
    medium.calls.clear()
    lab.run(prompt, "cacheblend:ratio=0.3,check_layer=2")
    layers = lab.model.layout.num_layers
    sections = [c for c in medium.of("read") if c.offset]
    pieces = {c.key for c in sections}
    assert len(sections) == (layers - 2) * len(pieces)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), technique=st.sampled_from(TECHNIQUES), staging=st.sampled_from([0, 3_000, 2**20]))
def test_delays_and_a_small_staging_area_change_nothing(seed: int, technique: str, staging: int) -> None:
    """T18: whatever order the bytes arrive in, the result has the same bits; public failure 18: nothing spins or hangs."""
    documents, prompt = standard()
    rng = random.Random(seed)
    medium = FaultyBlobs(MemoryBlobs())
    lab = filled(medium, documents, options=TierOptions(staging=staging, threads=3))
    medium.choose = lambda operation: rng.choice([0.0, 0.0, 0.002])
    assert torch.equal(lab.run(prompt, technique).logits, in_memory(documents).run(prompt, technique).logits)
    assert lab.store.staging.used == 0


def in_read(number: int, fault: Fault, *, and_after: bool = False) -> Callable[[str], Fault]:
    """``fault`` in one read; the first four of a ``standard`` prompt are those of the headers."""
    reads = itertools.count()

    def choose(operation: str) -> Fault:
        at = next(reads) if operation == "read" else -1
        return fault if at == number or (and_after and at > number) else None

    return choose


HEADERS = 4
BROKEN: dict[str, Callable[[], Callable[[str], Fault]]] = {
    "one bit": lambda: in_read(HEADERS + 1, "flip"),
    "the end": lambda: in_read(HEADERS + 3, "cut"),
    "every read": lambda: always("io", "read"),
    "every open": lambda: always("io", "open"),
    "no memory": lambda: always("no_memory", "read"),
    "too late": lambda: always("deadline", "read"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("technique", ["epic:k=4", "cacheblend:ratio=0.3", "question:ratio=0.3", "prefix"])
def test_what_fails_is_computed_counted_and_named(technique: str, what: str) -> None:
    """Failures before and after a Select, of some or of all chunks: a right answer, and nothing left behind."""
    documents, prompt = standard()
    medium = FaultyBlobs(MemoryBlobs())
    recording = RecordingBlobs(medium)
    lab = filled(recording, documents)
    medium.choose = BROKEN[what]()
    result = lab.run(prompt, technique, keep=2)
    report = result.report
    lost = [s for s in report.segments if s.reason is not None]
    if report.ran == "exact":
        assert close(result.logits, lab.native(prompt)[-2:])
        assert technique == "prefix" or report.fallback_reason in ("bad_record", "load_timeout", "no_chunk_hit")
    else:  # the rest was worth its technique: as if the lost chunks had never been stored
        assert lost
        assert report.prefilled_tokens > Lab().run(prompt, "full").report.prompt_tokens - sum(map(len, documents))
    failed = sum(lab.engine.counters.lost_loads.values())
    misses = lab.store.tiers[0].counters.misses
    assert failed + sum(misses.values()) - misses["absent"] >= (0 if technique == "prefix" and not lost else 1)
    assert lab.store.staging.used == 0
    assert recording.opened == recording.closed
    medium.choose = lambda operation: None
    healed = lab.run(prompt, "full", keep=2)
    assert close(healed.logits, lab.native(prompt)[-2:])


def test_a_lost_chunk_is_a_hole() -> None:
    """With one record damaged the others are fused, as if that document had never been precomputed."""
    documents, prompt = standard()
    medium = FaultyBlobs(MemoryBlobs())
    lab = filled(medium, documents)
    medium.choose = in_read(HEADERS + 2, "flip")
    result = lab.run(prompt, "epic:k=4")
    (lost,) = [s for s in result.report.segments if s.reason is not None]
    assert lost.reason == "checksum"
    others = Lab()
    chunks = {p.identity.key for d in documents for p in others.engine.parts.chunks.pieces(d, (BOS,))}
    others.precompute(*documents)
    missing = chunks - set(lab.store.tiers[0].blobs.blobs._values)  # type: ignore[attr-defined]
    assert len(missing) == 1, "the damaged record was thrown away"
    others.store.remove(missing)
    assert close(result.logits, others.run(prompt, "epic:k=4").logits)


def test_a_late_medium_costs_the_deadline_and_no_more() -> None:
    documents, prompt = standard()
    medium = FaultyBlobs(MemoryBlobs())
    lab = filled(medium, documents)
    lab.engine.reconfigure(load_timeout=0.2)
    medium.choose = in_read(HEADERS, 30.0, and_after=True)
    result = lab.run(prompt, "epic:k=4", keep=2)
    assert (result.report.ran, result.report.fallback_reason) == ("exact", "load_timeout")
    assert close(result.logits, lab.native(prompt)[-2:])
    assert 150 < result.report.timings["load_wait_ms"] < 2_000


def test_a_late_load_doesnt_hold_up_the_others() -> None:
    documents, prompt = standard()
    medium = FaultyBlobs(MemoryBlobs())
    lab = filled(medium, documents)
    medium.choose = lambda operation: 0.3 if operation == "read" else None
    late = lab.add(prompt, "epic:k=4")
    quick = [lab.add(prompt_of([BOS, 4], doc(9, i)), "full", max_tokens=3) for i in range(3)]
    finished: list[int] = []
    while any(s.output is None for s in (late, *quick)):
        finished += [id(s) for s in lab.engine.step() if s.output is not None]
    assert finished.index(id(late)) == 3
    assert late.output is not None
    assert late.output.reuse.ran == "fused"


def test_a_record_read_in_full_moves_up_and_one_read_in_part_follows() -> None:
    documents, prompt = standard()
    for technique in ("naive", "epic:k=4"):
        medium = RecordingBlobs(MemoryBlobs())
        filled(medium, documents)
        lab = TieredLab(medium=medium, host=2**30)
        first = lab.run(prompt, technique)
        assert lab.store.flush(10)
        lab.forget_prefixes()
        medium.calls.clear()
        second = lab.run(prompt, technique)
        assert list(first.report.loads) == ["memory"]
        assert list(second.report.loads) == ["host"]
        assert not medium.of("read")
        assert torch.equal(first.logits, second.logits)


def test_the_controller_raises_the_ratio_and_declines_what_loses() -> None:
    documents, prompt = standard()
    lab = filled(MemoryBlobs(), documents)
    lab.engine.reconfigure(controller="auto")
    assert lab.run(prompt, "epic:ratio=0.2").report.controller is None, "nothing was measured yet"
    ratios = []
    for rate in (1e12, 1.2e6, 1e3):
        lab.forget_prefixes()
        lab.engine.profile.costs = lambda rate=rate: Costs(lambda rows, keys: 1e-3 * rows, {"memory": rate})  # type: ignore[method-assign, misc]
        report = lab.run(prompt, "epic:ratio=0.2").report
        assert report.controller is not None
        assert (report.ran, report.fallback_reason) == (("exact", "no_gain") if rate == 1e3 else ("fused", None))
        ratios.append(report.controller.ratio)
    assert 0.2 <= ratios[0] < 0.22 < ratios[1] < ratios[2] == 1.0


def test_loads_teach_the_profile() -> None:
    medium = FaultyBlobs(MemoryBlobs())
    lab = filled(medium, [doc(300, 1)], chunking=replace(Lab().chunking, size=300))
    medium.choose = lambda operation: 0.01 if operation == "read" else None
    for rows in (128, 256, 384):
        lab.engine.profile.note_prefill(rows, rows, rows * 1e-3)
    for number in range(3):
        early = lab.engine.profile.costs()
        assert early is not None
        assert early.bandwidth == {}, "one slow load must not decide"
        lab.run(prompt_of([BOS, 5], ("doc", doc(300, 1)), doc(7, number)), "naive")
        lab.forget_prefixes()
    costs = lab.engine.profile.costs()
    assert costs is not None
    seconds = 0.01 * lab.model.layout.num_layers  # a wait for each layer; one job, so the other threads don't count
    assert 0.2 < costs.bandwidth["memory"] * seconds / (300 * lab.model.layout.bytes_per_token) <= 1.0
    assert costs.prefill(256, 256) == pytest.approx(0.256, rel=0.05)


def test_erasure_reaches_prefixes_memory_and_media() -> None:
    documents, prompt = standard()
    lab = filled(MemoryBlobs(), documents, host=2**30)
    lab.run(prompt, "naive")
    assert lab.run(prompt, "prefix").report.cached_tokens > 0
    receipt = lab.engine.erase()
    assert {name: tier.state for name, tier in receipt.tiers.items()} == {"host": "deleted", "memory": "deleted"}
    assert receipt.tiers["memory"].records == receipt.tiers["host"].records == 4
    assert lab.engine.tree.num_tokens == 0
    report = lab.run(prompt, "naive").report
    assert (report.cached_tokens, report.fused_tokens) == (0, 0)
    assert {s.reason for s in report.segments} == {"never_seen"}
    lab.forget_prefixes()
    lab.precompute(*documents)
    assert lab.run(prompt, "naive").report.fused_tokens > 0, "the tenant may store again, under another key"


def logits_of(lab: Lab, technique: str) -> Tensor:
    return lab.run(standard()[1], technique).logits


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_lossy_codec_is_never_exact_and_the_same_in_every_tier(codec: str) -> None:
    documents, prompt = standard()
    medium = MemoryBlobs()
    options = TierOptions(codec=codec)  # type: ignore[arg-type]
    near, far = TieredLab(medium=medium, host=2**30, options=options), TieredLab(medium=medium, options=options)
    for lab in (near, far):
        lab.engine.reconfigure(chunks=replace(lab.engine.parts.chunks, lossy=True))
    near.precompute(*documents)
    near.store.flush(10)
    a, b = near.run(prompt, "naive"), far.run(prompt, "naive")
    assert torch.equal(a.logits, b.logits)
    assert (list(a.report.loads), list(b.report.loads)) == (["host"], ["memory"])
    raw = logits_of(in_memory(documents), "naive")
    assert 0 < float((a.logits - raw).abs().max()) < 0.2
    behind = prompt_of([BOS], ("doc", documents[1]), doc(7, 3))  # stands where its anchor says
    assert in_memory(documents).run(behind, "prefix").report.cached_tokens > 0
    assert far.run(behind, "prefix").report.cached_tokens <= 1, "BOS at most"


def test_a_request_that_waits_for_slots_sees_an_erasure() -> None:
    documents, prompt = standard()
    lab = filled(MemoryBlobs(), documents, host=2**30, slots=len(prompt.token_ids) + 60)
    running = lab.add(prompt_of([BOS, 5], doc(40, 7)), "full", max_tokens=40)
    lab.engine.step()
    waiting = lab.add(prompt, "naive", max_tokens=1)
    wait([waiting.looking])  # type: ignore[list-item]
    lab.engine.step()
    assert lab.engine.scheduler.waiting, "there is no room for it yet"
    lab.engine.erase()
    lab.engine.run([running, waiting])
    assert waiting.output is not None
    assert {s.result for s in waiting.output.reuse.segments} == {"miss"}
    assert lab.store.host.stats().records == 0


def test_an_answer_that_comes_between_admission_and_waiting() -> None:
    """The lookup finishes after the request wasn't admitted because of it, and before the step waits for it."""
    documents, prompt = standard()
    lab = filled(MemoryBlobs(), documents)
    sequence = lab.add(prompt, "naive")
    looking = sequence.looking
    assert looking is not None
    wait([looking])
    found = looking.result()
    late: Future[Found] = Future()
    sequence.looking = late
    admit = lab.engine.scheduler.admit

    def admit_then_answer(start: Callable[[Running], bool]) -> None:
        admit(start)
        if not late.done():
            late.set_result(found)

    lab.engine.scheduler.admit = admit_then_answer  # type: ignore[method-assign]
    lab.engine.run([sequence])
    assert sequence.output is not None
    assert sequence.output.reuse.fused_tokens > 0


def test_a_small_staging_area_starves_nobody_and_a_stuck_read_costs_its_deadline() -> None:
    documents, prompt = standard()
    for staging, stuck in ((1, 0.0), (2**29, 3.0)):
        medium = FaultyBlobs(MemoryBlobs())
        lab = filled(medium, documents, options=TierOptions(staging=staging), slots=1500)
        lab.engine.reconfigure(load_timeout=0.2)
        long = lab.add(prompt_of([BOS, 5]), "full", max_tokens=400)
        lab.engine.step()
        late = lab.add(prompt, "epic:k=4", max_tokens=1)
        wait([late.looking])  # type: ignore[list-item]
        medium.before = lambda operation, deadline, stuck=stuck: time.sleep(stuck) if operation == "read" else None  # type: ignore[assignment, misc, return-value]
        while late.output is None:
            lab.engine.step()
        assert long.output is None, "it isn't kept waiting until the others are done"
        assert late.output.reuse.ran == ("exact" if stuck else "fused")
        lab.engine.abort(long)


@pytest.mark.parametrize(
    "data",
    [
        "{}",
        "[]",
        "x",
        '{"format": 1, "prefills": [[128, 128, NaN], [128, 128, 0], [128, 128, -1]], "loads": {"memory": [0, NaN, -1]}}',
        '{"format": 1, "prefills": [[Infinity, 1, 1.0]], "loads": {"memory": []}}',
        '{"format": 1, "prefills": 3, "loads": []}',
    ],
)
def test_a_profile_that_makes_no_sense_is_measured_anew(data: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(data)
    profile = Profile(path)
    assert not profile.measured
    for rows in (64, 128, 256):
        profile.note_prefill(rows, rows, rows * 1e-3)
        profile.note_prefill(rows, rows, float("nan"))
    profile.note_load("memory", 2**20, 0.0)
    costs = profile.costs()
    assert costs is not None
    assert costs.bandwidth == {}
    assert costs.prefill(128, 128) == pytest.approx(0.128, rel=0.05)
    profile.save()
    assert Profile(path).measured


def test_one_request_in_twenty_tries_a_tier_that_was_declined() -> None:
    """Or a tier that was slow once would never be measured again."""
    documents, prompt = standard()
    lab = filled(MemoryBlobs(), documents)
    lab.engine.reconfigure(controller="auto")
    lab.engine.profile.costs = lambda: Costs(lambda rows, keys: 1e-3 * rows, {"memory": 1e3})  # type: ignore[method-assign]
    ran = []
    for _ in range(20):
        lab.forget_prefixes()
        ran.append(lab.run(prompt, "naive").report.ran)
    assert ran == ["exact"] * 19 + ["fused"]


def test_what_a_finished_prefill_held_is_given_back_before_the_answer_ends() -> None:
    documents, prompt = standard()
    faulty = FaultyBlobs(MemoryBlobs())
    medium = RecordingBlobs(faulty)
    lab = filled(medium, documents)
    for fault in (None, "io"):
        faulty.choose = in_read(HEADERS + 1, fault)  # type: ignore[arg-type]
        sequence = lab.add(prompt, "epic:k=4", max_tokens=50)
        while len(sequence.output_ids) < 3:
            lab.engine.step()
        assert sequence.output is None
        assert lab.store.staging.used == 0
        assert medium.opened == medium.closed
        lab.engine.run([sequence])
        lab.forget_prefixes()


def test_a_long_queue_doesnt_hold_all_its_records_open() -> None:
    documents, prompt = standard()
    medium = RecordingBlobs(MemoryBlobs())
    lab = filled(medium, documents)
    queue = [lab.add(prompt, "epic:k=4", max_tokens=1) for _ in range(60)]
    wait([s.looking for s in queue if s.looking is not None])
    assert medium.opened - medium.closed <= 16 * HEADERS
    lab.engine.run(queue)
    assert {s.output.reuse.ran for s in queue if s.output is not None} <= {"fused", "exact"}
    assert all(s.output is not None for s in queue)
    assert medium.opened == medium.closed
