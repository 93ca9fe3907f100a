"""The catalogue alone: rows that follow files, claims, damage, other processes' locks."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvweave.errors import PinQuotaExceeded
from kvweave.store.base import TierError
from kvweave.store.catalog import Catalog, Claim, Uncounted, Usage
from kvweave.store.eviction import Limits
from kvweave.store.files import SUFFIX, Files

SCOPE, OTHER = b"\xaa", b"\xbb"


def name(i: int, scope: bytes = SCOPE) -> str:
    return f"01/{scope.hex()}/{i:02x}/{i:04x}"


def write(folder: Path, record: str, size: int) -> None:
    path = folder / f"{record}{SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def plenty() -> int:
    return 10**15


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(Files(str(tmp_path)), patience=0.3)
    catalog.counted()
    yield catalog
    catalog.close()


def claim(i: int, size: int, owner: str = "me", scope: bytes = SCOPE) -> Claim:
    return Claim(f"temp{i}", name(i, scope), size, owner, 0, 7, 1.5)


def test_rows_follow_files(catalog: Catalog, tmp_path: Path) -> None:
    write(tmp_path, name(1), 100)
    write(tmp_path, name(2, OTHER), 50)
    catalog.sync([name(1), name(2, OTHER), name(3)])
    assert catalog.usage() == {SCOPE: Usage(100, 1), OTHER: Usage(50, 1)}
    write(tmp_path, name(1), 70)
    (tmp_path / f"{name(2, OTHER)}{SUFFIX}").unlink()
    catalog.sync([name(1), name(2, OTHER)])
    assert catalog.usage() == {SCOPE: Usage(70, 1)}
    assert catalog.sizes() == {name(1): 70}


def test_nothing_is_reserved_before_the_files_were_counted(tmp_path: Path) -> None:
    catalog = Catalog(Files(str(tmp_path)))
    with pytest.raises(Uncounted):
        catalog.reserve(claim(1, 10), Limits(100), plenty, only_below_high=False)
    catalog.counted()
    assert catalog.reserve(claim(1, 10), Limits(100), plenty, only_below_high=False) is None
    catalog.close()


def test_claims_count_until_they_are_settled(catalog: Catalog, tmp_path: Path) -> None:
    limits = Limits(100)
    assert catalog.reserve(claim(1, 60), limits, plenty, only_below_high=False) is None
    need = catalog.reserve(claim(2, 60), limits, plenty, only_below_high=False)
    assert need is not None
    assert need.required == 20
    assert catalog.used() == {SCOPE: 60}
    assert catalog.usage() == {}
    catalog.settle(claim(1, 60))  # its file never came
    assert catalog.used() == {}
    assert catalog.reserve(claim(2, 60), limits, plenty, only_below_high=False) is None
    write(tmp_path, name(2), 60)
    catalog.settle(claim(2, 60))
    assert catalog.claims() == []
    (found,) = catalog.entries()
    assert (found.name, found.size, found.prefill_ms) == (name(2), 60, 1.5)


def test_a_file_that_was_moved_counts_where_it_is(catalog: Catalog, tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path, name(i), 10)
    catalog.sync([name(0), name(1)])
    (tmp_path / f"{name(0)}{SUFFIX}").rename(tmp_path / "aside")
    (tmp_path / f"{name(1)}{SUFFIX}").unlink()
    catalog.moved(name(0), "aside")
    catalog.moved(name(1), "removed meanwhile")
    assert catalog.claims() == [Claim("aside", name(0), 10, "")]
    assert catalog.used() == {SCOPE: 10}
    assert catalog.sizes() == {}
    catalog.unclaim(["aside"])
    assert catalog.used() == {}


def test_space_of_the_file_system_is_shared_with_unfinished_writes(catalog: Catalog) -> None:
    spare = 100
    assert catalog.reserve(claim(1, 60), Limits(None), lambda: spare, only_below_high=False) is None
    need = catalog.reserve(claim(2, 60), Limits(None), lambda: spare, only_below_high=False)
    assert need is not None
    assert need.required == 20


def test_reservations_by_many_never_exceed_the_capacity(tmp_path: Path) -> None:
    catalogs = [Catalog(Files(str(tmp_path))) for _ in range(3)]
    catalogs[0].counted()
    granted: list[bool] = []

    def reserve(which: int) -> None:
        for i in range(20):
            need = catalogs[which].reserve(claim(100 * which + i, 7), Limits(100), plenty, only_below_high=False)
            granted.append(need is None)

    threads = [threading.Thread(target=reserve, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(granted) == 14  # 14 * 7 <= 100
    for catalog in catalogs:
        catalog.close()


def test_eviction_removes_files_spares_pins_and_is_remembered(catalog: Catalog, tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path, name(i), 10)
    catalog.sync([name(i) for i in range(3)])
    now = time.time()
    assert catalog.pin(name(1), now + 60, "test", now, None)
    (tmp_path / f"{name(2)}{SUFFIX}").unlink()  # vanished: its row goes all the same
    assert catalog.evict([name(i) for i in range(4)], now, clock=5.0) == [(name(0), 10), (name(2), 10)]
    assert catalog.sizes() == {name(1): 10}
    assert not (tmp_path / f"{name(0)}{SUFFIX}").exists()
    assert catalog.evicted() == [name(0), name(2)]
    assert catalog.get("clock") == 5.0
    write(tmp_path, name(0), 10)
    catalog.sync([name(0)])
    assert catalog.evicted() == [name(2)]  # it is back
    assert catalog.evict([name(1)], now + 61, 0.0) == [(name(1), 10)]  # the pin has ended
    assert catalog.get("clock") == 5.0  # never goes back


def test_pins_have_a_limit_and_need_a_record(catalog: Catalog, tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path, name(i), 30)
    assert catalog.pin(name(0), 100.0, "x", 1.0, most=50)  # found by its file
    assert catalog.pin(name(0), 200.0, "x", 1.0, most=50)  # renewed, not counted twice
    with pytest.raises(PinQuotaExceeded):
        catalog.pin(name(1), 100.0, "x", 1.0, most=50)
    assert catalog.pin(name(1), 300.0, "x", 201.0, most=50)  # the other one has expired
    assert not catalog.pin(name(9), 100.0, "x", 1.0, most=50)
    assert catalog.unpin(name(1), 201.0)
    assert not catalog.unpin(name(1), 201.0)


def test_uses_are_added_up(catalog: Catalog, tmp_path: Path) -> None:
    write(tmp_path, name(0), 10)
    catalog.sync([name(0)])
    (before,) = catalog.entries()
    catalog.touch({name(0): (3, before.heat_at + 3600), name(5): (1, 0.0)})
    (after,) = catalog.entries()
    assert after.hits == 3
    assert after.last_used == before.heat_at + 3600
    assert after.heat == pytest.approx(0.5 + 3)


def test_listing_goes_on_over_many_pages(catalog: Catalog, tmp_path: Path) -> None:
    for i in range(600):
        write(tmp_path, name(i, OTHER if i % 3 else SCOPE), 1)
    catalog.sync(name(i, OTHER if i % 3 else SCOPE) for i in range(600))
    assert len({e.name for e in catalog.listing(None)}) == 600
    assert {e.scope for e in catalog.listing(SCOPE.hex())} == {SCOPE}
    assert len(list(catalog.listing(SCOPE.hex()))) == 200


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(8192))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def missing(path: Path) -> None:
    path.unlink()


def broken_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(bytes(data))


def other_version(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


DAMAGE = [garbage, empty, missing, broken_page, other_version]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_catalogue_is_replaced(damage: Callable[[Path], None], tmp_path: Path) -> None:
    old = Catalog(Files(str(tmp_path)))
    write(tmp_path, name(0), 10)
    old.sync([name(0)])
    old.counted()
    old.close()
    damage(tmp_path / "catalog.sqlite")
    catalog = Catalog(Files(str(tmp_path)))
    assert catalog.sizes() == {}
    assert catalog.get("counted") == 0
    catalog.sync([name(0)])
    assert catalog.sizes() == {name(0): 10}
    assert catalog.rebuilds == (0 if damage is missing else 1)
    catalog.close()


@pytest.mark.parametrize("damage", [garbage, missing])
def test_a_catalogue_replaced_under_a_running_process_is_opened_anew(damage: Callable[[Path], None], tmp_path: Path) -> None:
    first, second = Catalog(Files(str(tmp_path))), Catalog(Files(str(tmp_path)))
    first.set("x", 1)
    assert second.get("x") == 1
    second.close()
    (tmp_path / "catalog.sqlite").rename(tmp_path / "elsewhere")
    if damage is garbage:
        garbage(tmp_path / "catalog.sqlite")
    second.set("x", 2)
    assert first.get("x") == 2
    first.set("y", 3)
    assert second.get("y") == 3
    first.close()
    second.close()


def test_a_locked_catalogue_is_busy_and_then_works_again(catalog: Catalog, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    start = time.monotonic()
    with pytest.raises(TierError) as caught:
        catalog.set("x", 1)
    assert caught.value.reason == "busy"
    assert time.monotonic() - start < 2
    assert catalog.get("x") == 0  # readers aren't held up
    other.execute("ROLLBACK")
    other.close()
    catalog.set("x", 1)
    assert catalog.get("x") == 1


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        catalog = Catalog(Files(str(tmp_path)))
        catalog.set("x", 1)
        modes = {p.name: p.stat().st_mode & 0o777 for p in tmp_path.iterdir()}
        catalog.close()
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}
    assert {"catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "catalog.lock"} <= set(modes)
