"""Policies on hand-made records, and quotas: as rules on examples, and as properties on random ones."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import InvalidOption
from kvweave.store.eviction import POLICIES, Cost, Entry, Limits, Need, Quota, decayed, make_policy, victims

A, B, C = b"a", b"b", b"c"
MB = 10**6


def entry(name: str, scope: bytes = A, size: int = 10, used: float = 0.0, **more: float | None) -> Entry:
    fields = {"created": 0.0, "hits": 0, "heat": 1.0, "heat_at": 0.0, "prefill_ms": None, "clock": 0.0, "pinned_until": 0.0}
    return Entry(name=name, scope=scope, size=size, last_used=used, **{**fields, **more})


def used_by(entries: list[Entry]) -> Counter[bytes]:
    used: Counter[bytes] = Counter()
    for e in entries:
        used[e.scope] += e.size
    return used


def choose(entries: list[Entry], limits: Limits, scope: bytes, size: int, need: Need, policy: str = "lru") -> list[str]:
    chosen = victims(entries, used_by(entries), limits, make_policy(policy, 0.0, 1e9), 1.0, scope, size, need)
    return [e.name for e in chosen]


@pytest.mark.parametrize(("policy", "first"), [("lru", "unused"), ("lfu", "rare"), ("fifo", "old")])
def test_each_simple_policy_takes_its_own_first(policy: str, first: str) -> None:
    entries = [
        entry("unused", used=1, hits=9, created=9),
        entry("rare", used=9, hits=1, created=8),
        entry("old", used=8, hits=8, created=1),
    ]
    assert choose(entries, Limits(30), A, 10, Need(0, 10, 10), policy) == [first]


def test_an_unknown_policy_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'lru'"):
        make_policy("lruu", 0.0, 1.0)
    assert set(POLICIES) == {"lru", "lfu", "fifo", "cost"}


def test_cost_prefers_what_saves_more_a_byte() -> None:
    policy = Cost(now=0.0, bytes_per_second=1000 * MB)
    dear, cheap = entry("dear", size=MB, prefill_ms=500.0), entry("cheap", size=MB, prefill_ms=50.0)
    large = entry("large", size=100 * MB, prefill_ms=500.0)
    assert policy.priority(dear) > policy.priority(cheap) > policy.priority(large)


def test_cost_counts_recent_hits_and_forgets_old_ones() -> None:
    policy = Cost(now=7200.0, bytes_per_second=1000 * MB)
    recent, old = (entry(str(at), size=MB, prefill_ms=100.0, heat=4.0, heat_at=at) for at in (7200.0, 0.0))
    assert policy.value(recent) == pytest.approx(4 * policy.value(old))
    assert decayed(8.0, -50.0) == 8.0  # a clock that went backwards


def test_what_loads_slower_than_it_computes_goes_before_everything_else() -> None:
    policy = Cost(now=0.0, bytes_per_second=MB)
    losing = entry("losing", size=MB, prefill_ms=900.0, clock=1e9)  # loading takes a second
    assert policy.value(losing) < 0
    assert policy.priority(losing) < policy.priority(entry("gains", size=MB, prefill_ms=1001.0))
    unknown = entry("unknown", size=MB)
    assert policy.value(unknown) > 0


def test_rent_makes_a_record_that_is_hardly_used_worthless() -> None:
    record = entry("r", size=MB, prefill_ms=100.0, heat=0.01)
    assert Cost(0.0, 1e9).value(record) > 0 > Cost(0.0, 1e9, rent=1e-4).value(record)


def test_the_clock_lets_old_treasures_go() -> None:
    policy = Cost(now=0.0, bytes_per_second=1000 * MB)
    treasure = entry("treasure", size=MB, prefill_ms=500.0, clock=0.0)
    later = entry("later", size=MB, prefill_ms=50.0, clock=policy.priority(treasure))
    assert policy.priority(later) > policy.priority(treasure)


@pytest.mark.parametrize(
    ("used", "size", "spare", "need"),
    [
        (80, 10, 1000, Need()),  # up to the high mark nothing goes
        (85, 10, 1000, Need(0, 0, 15)),  # above it: down to the low mark, but not by force
        (95, 10, 1000, Need(0, 5, 25)),
        (50, 10, 4, Need(0, 6, 10)),  # the disk is too full, whatever the capacity: a tenth of what is held goes at once
    ],
)
def test_what_a_write_needs(used: int, size: int, spare: int, need: Need) -> None:
    assert Limits(100).need({A: used}, A, size, spare) == need


def test_without_a_capacity_only_the_disk_limits() -> None:
    assert Limits(None).need({A: 10**15}, A, 10, 10) == Need()
    assert Limits(None).need({A: 0}, A, 10, 9).must


def test_a_scope_over_its_maximum_gives_its_own() -> None:
    limits = Limits(1000, quotas={A: Quota(max=30)})
    entries = [entry("a1", A, used=5), entry("a2", A, used=6), entry("a3", A, used=7), entry("b", B, used=1)]
    need = limits.need(used_by(entries), A, 10, 10**9)
    assert need == Need(own=10, own_wanted=16), "down to the low mark"
    assert choose(entries, limits, A, 10, need) == ["a1", "a2"]


def test_victims_are_first_those_over_their_maximum_then_those_over_their_reservation() -> None:
    limits = Limits(100, quotas={A: Quota(max=10), B: Quota(reserved=20), C: Quota(reserved=10)})
    entries = [entry("a1", A, used=8), entry("a2", A, used=9), entry("b1", B, used=1), entry("b2", B, used=2)]
    entries += [entry("c1", C, used=3), entry("c2", C, used=4)]
    assert choose(entries, limits, b"new", 10, Need(0, 10, 10)) == ["a1"]
    assert choose(entries, limits, b"new", 10, Need(0, 20, 20)) == ["a1", "c1"]  # b is at its reservation: not touched
    assert choose(entries, limits, b"new", 10, Need(0, 90, 90)) == ["a1", "c1", "a2"]


def test_a_scope_within_its_reservation_gets_its_place() -> None:
    limits = Limits(100, quotas={A: Quota(reserved=50), B: Quota(reserved=45)})
    entries = [entry(f"b{i}", B, size=10, used=i) for i in range(5)] + [entry(f"a{i}", A, used=9) for i in range(4)]
    need = Need(0, 10, 20)
    assert choose(entries, limits, A, 10, need) == ["b0"]  # 50 of 45 reserved: one may go, though 40 remain
    assert choose(entries, limits, C, 10, need) == []  # a scope without a reservation can't take it


def test_own_records_go_when_nobody_else_has_any_to_spare() -> None:
    limits = Limits(100, quotas={A: Quota(reserved=50), B: Quota(reserved=50)})
    entries = [entry("a", A, 50), entry("b1", B, 30, used=2), entry("b2", B, 20, used=1)]
    assert choose(entries, limits, B, 10, Need(0, 10, 30)) == ["b2"]


def test_pins_are_never_chosen() -> None:
    entries = [entry("pinned", used=0, pinned_until=2.0), entry("expired", used=1, pinned_until=0.5)]
    assert choose(entries, Limits(20), A, 10, Need(0, 20, 20)) == ["expired"]


@pytest.mark.parametrize(
    ("capacity", "default", "quotas"),
    [
        (-1, Quota(), {}),
        (100, Quota(reserved=-1), {}),
        (100, Quota(), {A: Quota(reserved=20, max=10)}),
        (100, Quota(), {A: Quota(reserved=60), B: Quota(reserved=41)}),
    ],
)
def test_quotas_that_make_no_sense_are_refused(capacity: int, default: Quota, quotas: dict[bytes, Quota]) -> None:
    with pytest.raises(InvalidOption):
        Limits(capacity, default, quotas)
    Limits(100, Quota(), {A: Quota(reserved=60), B: Quota(reserved=40)})


SCOPES = st.sampled_from([A, B, C])


@settings(max_examples=200, deadline=None)
@given(
    records=st.lists(st.tuples(SCOPES, st.integers(1, 20), st.integers(0, 9), st.booleans()), max_size=20),
    scope=SCOPES,
    size=st.integers(1, 30),
    reserved=st.tuples(*[st.integers(0, 60)] * 3),
    amount=st.integers(0, 200),
)
def test_properties_of_any_choice(
    records: list[tuple[bytes, int, int, bool]], scope: bytes, size: int, reserved: tuple[int, int, int], amount: int
) -> None:
    limits = Limits(None, quotas={s: Quota(reserved=r) for s, r in zip((A, B, C), reserved, strict=True)})
    entries = [
        entry(str(i), s, n, used=float(u), pinned_until=9.0 if pinned else 0.0)
        for i, (s, n, u, pinned) in enumerate(records)
    ]
    used = used_by(entries)
    chosen = victims(entries, used, limits, make_policy("lru", 0.0, 1e9), 1.0, scope, size, Need(0, amount, amount))
    assert len({e.name for e in chosen}) == len(chosen)
    assert all(e.pinned_until <= 1.0 for e in chosen)
    if chosen:
        assert sum(e.size for e in chosen[:-1]) < amount  # no more than needed
    left = used - used_by(chosen)
    for other in {A, B, C} - {scope}:
        taken = [e for e in chosen if e.scope == other]
        if taken and left[other] < limits.of(other).reserved:  # only by one record, and only for a scope within its own
            assert used[scope] + size <= limits.of(scope).reserved
            assert left[other] + max(e.size for e in taken) > limits.of(other).reserved
