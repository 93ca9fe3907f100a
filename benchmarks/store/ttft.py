"""Time to the first token with the documents in host memory, on disk, in Redis, on throttled disks, and without them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.fusion.__main__ import DOCUMENT_TOKENS, DOCUMENTS, Ours
from kvweave.engine.engine import Engine
from kvweave.llm import LLM
from kvweave.reuse.controller import Policy
from kvweave.store.base import Blobs
from kvweave.store.host import HostStore
from kvweave.store.record import GROUP
from kvweave.store.tiered import TieredStore, TierOptions


class Arm:
    """One place for the documents' KV, and how it is used."""

    def __init__(
        self, llm: LLM, medium: Blobs | None, technique: str, controller: Policy | None, threads: int, host: int = 0
    ) -> None:
        self.llm, self.technique, self.controller = llm, technique, controller
        layout = llm.engine.parts.pool.layout
        options = TierOptions(threads=threads, load_timeout=120.0)
        media = [] if medium is None else [medium]
        self.store = TieredStore(HostStore(host), media, layout=layout, options=options)
        self.reports: list[Any] = []
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def use(self) -> Engine:
        engine = self.llm.engine
        chunks = replace(engine.parts.chunks, store=self.store)
        engine.reconfigure(chunks=chunks, controller=self.controller, load_timeout=120.0)
        return engine

    def run(self, ours: Ours, keep: bool) -> None:
        self.use()
        start, start_cpu = time.perf_counter(), time.process_time()
        report = ours.run(self.technique)
        if keep:
            self.wall.append(time.perf_counter() - start)
            self.cpu.append(time.process_time() - start_cpu)
            self.reports.append(report)

    def summary(self, full: float) -> dict[str, Any]:
        last = self.reports[-1]
        waits = [r.timings["load_wait_ms"] for r in self.reports]
        threads = self.store.io_threads
        busy = [sum(load.load_ms for tier, load in r.loads.items() if tier != "host") / threads for r in self.reports]
        row: dict[str, Any] = {
            "technique": self.technique,
            "controller": self.controller or "off",
            "ran": last.ran,
            "ttft_s": median(self.wall),
            "cpu_s": median(self.cpu),
            "ttft_ratio": median(self.wall) / full,
            "budget": last.budget,
            "load_wait_ms": median(waits),
            "transfer_ms": median(busy),
            "overlap": 1 - median(waits) / median(busy) if median(busy) else None,
            "bytes": {tier: load.bytes for tier, load in last.loads.items()},
        }
        if last.controller is not None:
            row["decision"] = {
                name: getattr(last.controller, name)
                for name in ("run", "ratio", "r_eq", "predicted_ttft_ms", "predicted_full_ms", "load_ms")
            }
        return row


def measure(arms: dict[str, Arm], ours: Ours, repeat: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """All arms in turns, after one round that isn't counted."""
    for turn in range(repeat + 1):
        for name, arm in arms.items():
            arm.run(ours, keep=turn > 0)
            progress(f"{name}: {turn} of {repeat}")
    full = median(arms["full prefill"].wall)
    return {name: arm.summary(full) for name, arm in arms.items()}


def bytes_as_predicted(arm: Arm, ours: Ours) -> list[dict[str, Any]]:
    """Bytes read at several ratios against the formula: whole groups of the rows that aren't recomputed, in every layer."""
    rows = []
    for ratio in (0.15, 0.3, 0.5):
        arm.technique = f"epic:ratio={ratio}"
        arm.use()
        report = ours.run(arm.technique)
        layout = arm.llm.engine.parts.pool.layout
        fused = DOCUMENTS - 1  # the first document stands where it was computed: exact, read in full
        computed = math.ceil(ratio * DOCUMENT_TOKENS)  # the first tokens of each chunk
        rows_read = DOCUMENT_TOKENS - computed // GROUP * GROUP
        predicted = (fused * rows_read + DOCUMENT_TOKENS) * layout.bytes_per_token
        read = sum(load.bytes for load in report.loads.values())
        rows.append({"ratio": ratio, "bytes": read, "predicted": predicted, "equal": read == predicted})
    return rows
