"""The quality gate: what a record opens, what closes it again, and the whole table of modes."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.config import EngineConfig
from kvweave.core.keys import ModelFingerprint
from kvweave.errors import ConfigError
from kvweave.reuse.cacheblend import CacheBlend
from kvweave.reuse.epic import Epic
from kvweave.reuse.gate import (
    Asked,
    Gate,
    GateRecord,
    Gates,
    GateState,
    GateStore,
    ModeChoice,
    choose_mode,
    gate_settings,
    technique_options,
)
from kvweave.reuse.naive import Naive
from kvweave.reuse.question import Question

MODEL = ModelFingerprint.of(weights="a")
OTHER = ModelFingerprint.of(weights="b")
SETTINGS = gate_settings(EngineConfig())
RECORD = GateRecord(
    fingerprint=MODEL.digest.hex(),
    technique="question",
    options=technique_options(Question(ratio=0.2)),
    settings=SETTINGS,
    limit=0.05,
    mean=0.03,
    upper=0.04,
    first_mean=0.02,
    first_upper=0.03,
    prompts=24,
    data="some:0123",
    model="m",
    measured_at="2026-12-01T00:00:00+00:00",
    attention="blocked",
    version="0.1.0",
)


@pytest.fixture
def store(tmp_path: Path) -> GateStore:
    return GateStore(tmp_path)


@pytest.fixture
def gates(store: GateStore) -> Gates:
    return Gates(store, MODEL, SETTINGS)


# --- the table --------------------------------------------------------------------------------------------------------

CLOSED, OPEN, FORCED = Gate("closed", 0.02), Gate("open", 0.02), Gate("forced", 0.02)
FAR: dict[GateState, Gate] = {state: Gate(state, 0.07) for state in ("closed", "open", "forced")}
UNKNOWN: dict[GateState, Gate] = {state: Gate(state) for state in ("closed", "open", "forced")}
TABLE: list[tuple[Asked, bool, Gate, ModeChoice]] = [
    ("fused", True, CLOSED, ModeChoice("exact", "quality_gate")),
    ("fused", True, OPEN, ModeChoice("fused")),
    ("fused", True, FORCED, ModeChoice("fused")),
    ("fused", True, UNKNOWN["closed"], ModeChoice("exact", "quality_gate")),
    ("fused", True, UNKNOWN["open"], ModeChoice("fused")),
    ("fused", True, UNKNOWN["forced"], ModeChoice("fused")),
    ("fused", True, FAR["closed"], ModeChoice("exact", "quality_gate")),
    ("fused", True, FAR["open"], ModeChoice("exact", "quality_gate")),
    ("fused", True, FAR["forced"], ModeChoice("fused")),
    ("auto", True, CLOSED, ModeChoice("exact")),
    ("auto", True, OPEN, ModeChoice("fused_if_faster")),
    ("auto", True, FORCED, ModeChoice("fused_if_faster")),
    ("auto", True, UNKNOWN["closed"], ModeChoice("exact")),
    ("auto", True, UNKNOWN["open"], ModeChoice("exact")),
    ("auto", True, UNKNOWN["forced"], ModeChoice("exact")),
    ("auto", True, FAR["closed"], ModeChoice("exact")),
    ("auto", True, FAR["open"], ModeChoice("exact")),
    ("auto", True, FAR["forced"], ModeChoice("exact")),
]
GATES = [CLOSED, OPEN, FORCED, *FAR.values(), *UNKNOWN.values()]


@pytest.mark.parametrize(("asked", "allowed", "gate", "choice"), TABLE, ids=lambda value: str(value))
def test_where_fused_is_allowed_the_gate_decides(asked: Asked, allowed: bool, gate: Gate, choice: ModeChoice) -> None:
    assert choose_mode(asked, gate, fused_allowed=allowed, max_divergence=0.05) == choice


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_where_it_is_not_allowed_nothing_is_fused(gate: Gate) -> None:
    assert choose_mode("fused", gate, fused_allowed=False) == ModeChoice("exact", "fused_disabled")
    assert choose_mode("auto", gate, fused_allowed=False) == ModeChoice("exact")


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("allowed", [True, False])
def test_who_asks_for_no_fusion_gets_what_was_asked(gate: Gate, allowed: bool) -> None:
    assert choose_mode("exact", gate, fused_allowed=allowed) == ModeChoice("exact")
    assert choose_mode("off", gate, fused_allowed=allowed) == ModeChoice("off")


@given(estimate=st.floats(0, 1), limit=st.floats(0, 1))
def test_an_estimate_may_reach_the_limit_but_not_pass_it(estimate: float, limit: float) -> None:
    gate = Gate("open", estimate)
    runs = [choose_mode(asked, gate, fused_allowed=True, max_divergence=limit).run for asked in ("fused", "auto")]
    assert runs == (["fused", "fused_if_faster"] if estimate <= limit else ["exact", "exact"])


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [RECORD, replace(RECORD, mean=math.inf, upper=math.inf), replace(RECORD, options={})])
def test_a_record_comes_back_as_it_was_written(store: GateStore, record: GateRecord) -> None:
    path = store.write(record)
    assert store.read(record.fingerprint, record.technique) == record
    assert list(store.records()) == [record]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing temporary is left


def test_a_name_with_a_slash_stays_in_the_folder(store: GateStore) -> None:
    record = replace(RECORD, technique="../lab/odd:name")
    path = store.write(record)
    assert path.parent == store.folder
    assert store.read(record.fingerprint, record.technique) == record


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "gates").write_text("a file")
    with pytest.raises(ConfigError, match="KVWEAVE_HOME"):
        GateStore(tmp_path).write(RECORD)


def test_no_record_is_no_warning(store: GateStore, caplog: pytest.LogCaptureFixture) -> None:
    assert store.read(RECORD.fingerprint, "question") is None
    assert list(store.records()) == []
    assert caplog.records == []


def _edit(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data | changes


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: "{",
        lambda data: "[1]",
        lambda data: "\xff",
        lambda data: {key: value for key, value in data.items() if key != "upper"},
        _edit(format=2),
        _edit(extra=1),
        _edit(upper="0.01"),
        _edit(upper=True),
        _edit(upper=-1.0),
        _edit(upper=math.nan),
        _edit(options=[]),
        _edit(fingerprint=OTHER.digest.hex()),
        _edit(technique="epic"),
    ],
)
def test_a_record_that_cannot_be_trusted_is_closed_with_a_warning(
    store: GateStore, gates: Gates, caplog: pytest.LogCaptureFixture, damage: Callable[[dict[str, Any]], Any]
) -> None:
    path = store.write(RECORD)
    assert gates.of(Question(ratio=0.2)).state == "open"  # the damage below is what closes it
    damaged = damage(json.loads(path.read_text()))
    path.write_bytes(damaged.encode("latin-1") if isinstance(damaged, str) else json.dumps(damaged).encode())
    with caplog.at_level(logging.WARNING, "kvweave.reuse"):
        assert [gates.of(Question(ratio=0.2)) for _ in range(3)] == [Gate("closed")] * 3
    assert [str(path) in message for message in caplog.messages] == [True]  # told once, not at every request


# --- gates ------------------------------------------------------------------------------------------------------------


def test_a_passing_record_opens_the_gate_of_a_running_process(store: GateStore, gates: Gates) -> None:
    technique = Question(ratio=0.2)
    assert gates.of(technique) == Gate("closed")
    store.write(RECORD)
    assert gates.of(technique) == Gate("open", 0.04)
    store.write(replace(RECORD, upper=0.0501))
    assert gates.of(technique) == Gate("closed", 0.0501)


def test_the_upper_bound_decides_not_the_mean(store: GateStore, gates: Gates) -> None:
    store.write(replace(RECORD, mean=0.0499, upper=0.06))
    assert gates.of(Question(ratio=0.2)).state == "closed"
    store.write(replace(RECORD, mean=0.0499, upper=0.05))
    assert gates.of(Question(ratio=0.2)).state == "open"


def test_a_gate_belongs_to_one_model_and_one_technique(store: GateStore, gates: Gates) -> None:
    store.write(RECORD)
    assert gates.of(Question(ratio=0.2)).state == "open"
    assert gates.of(CacheBlend(ratio=0.2)).state == "closed"
    assert Gates(store, OTHER, SETTINGS).of(Question(ratio=0.2)).state == "closed"


def test_it_covers_what_was_measured_and_higher_ratios(gates: Gates, store: GateStore) -> None:
    store.write(RECORD)
    assert [gates.of(Question(ratio=ratio)) for ratio in (0.2, 0.9)] == [Gate("open", 0.04)] * 2
    assert [gates.of(t) for t in (Question(ratio=0.19), Question(ratio=0.2, head=1))] == [Gate("closed")] * 2


@pytest.mark.parametrize(
    ("measured", "asked", "covered"),
    [
        (Epic(), Epic(), True),
        (Epic(k=16), Epic(k=32), False),  # more, but nobody looked
        (Epic(), Epic(ratio=0.5), False),
        (Epic(ratio=0.1), Epic(), False),
        (Naive(), Naive(), True),
    ],
)
def test_options_must_be_those_that_were_measured(measured: Any, asked: Any, covered: bool) -> None:
    record = replace(RECORD, technique=measured.name, options=technique_options(measured))
    assert record.covers(asked, SETTINGS) is covered


@pytest.mark.parametrize("change", [{"anchor": "bos"}, {"chunk_size": 256}, {"isolated_pieces": True}])
def test_other_settings_are_not_covered(store: GateStore, change: dict[str, Any]) -> None:
    store.write(RECORD)
    settings = gate_settings(EngineConfig(**change))
    assert Gates(store, MODEL, settings).of(Question(ratio=0.2)) == Gate("closed")


def test_forced_gates_keep_their_estimate(store: GateStore) -> None:
    forced = Gates(store, MODEL, SETTINGS, force=True)
    assert forced.of(Question(ratio=0.2)) == Gate("forced")
    store.write(replace(RECORD, upper=0.3))
    assert forced.of(Question(ratio=0.2)) == Gate("forced", 0.3)
    forced.close("question")
    assert forced.of(Question(ratio=0.2)).state == "forced"


def test_closed_by_live_traffic_until_it_is_measured_again(store: GateStore, gates: Gates) -> None:
    technique = Question(ratio=0.2)
    store.write(RECORD)
    store.write(replace(RECORD, technique="naive", options={}))
    gates.close("question")
    assert gates.of(technique) == Gate("closed", 0.04)
    assert gates.of(Naive()).state == "open"
    os.utime(store.path(RECORD.fingerprint, "question"))  # touched, not measured
    assert gates.of(technique).state == "closed"
    store.write(replace(RECORD, measured_at="2026-12-02T00:00:00+00:00"))
    assert gates.of(technique).state == "open"


@dataclass(frozen=True)
class _Odd:
    name: ClassVar[str] = "odd"
    layers: tuple[int, ...] = (1, 2)


def test_options_that_json_lacks_are_text() -> None:
    assert technique_options(_Odd()) == {"layers": "(1, 2)"}  # type: ignore[arg-type]
