"""Several processes on one folder: own bytes or a miss, and never over the capacity.

``python -m tests.store.test_disk_processes 60`` runs the load for that many seconds instead of two.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kvweave.store.base import Rejected, TierError
from kvweave.store.disk import DiskBlobs
from tests.store.test_disk import FOREVER, PAGE, A, B, content, files, get, key, leftovers, opened, put
from tests.store.test_disk_crash import forked

CAPACITY = 40 * PAGE
CHUNKS = [key(i, (A, B)[i % 2]) for i in range(80)]


def load(root: Path, seed: int, seconds: float, report: int) -> None:
    """Reads and writes on two threads; writes what came of it to ``report``."""
    store = DiskBlobs(root, CAPACITY, free_floor=0.0)
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            chunk = rng.choice(CHUNKS)
            try:
                data = get(store, chunk)
                if data is None:
                    put(store, chunk, rng.randint(1, 4))
                    counts["put"] += 1
                elif len(data) >= PAGE and data == content(chunk, len(data) // PAGE):
                    counts["right"] += 1
                else:
                    counts["wrong"] += 1
                if rng.random() < 0.02:
                    store.delete([chunk], FOREVER)
            except (Rejected, TierError) as error:
                counts[error.reason] += 1

    threads = [threading.Thread(target=work, args=(2 * seed + i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts["evicted"] = store.stats().evictions
    store.close()
    os.write(report, json.dumps(counts).encode() + b"\n")


def run(root: Path, seconds: float, processes: int = 2) -> tuple[Counter[str], int]:
    """Their counts together, and the most bytes that were ever seen while all stood still."""
    read, write = os.pipe()
    children = [forked(lambda seed=i: load(root, seed, seconds, write)) for i in range(processes)]
    os.close(write)
    most, running = 0, set(children)
    while running:
        time.sleep(0.05)
        for child in list(running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP)
            _, status = os.waitpid(child, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                assert status == 0
                running.discard(child)
        if (root / "v1").exists():
            most = max(most, sum(files(root).values()))
        for child in running:
            os.kill(child, signal.SIGCONT)
    total: Counter[str] = Counter()
    with open(read) as reports:
        for line in reports:
            total.update(json.loads(line))
    return total, most


def check(root: Path, seconds: float) -> Counter[str]:
    counts, most = run(root, seconds)
    assert counts["wrong"] == 0
    assert counts["right"] > 5 * seconds
    assert counts["evicted"] > 5 * seconds
    assert set(counts) <= {"right", "put", "evicted", "no_room", "wrong"}, counts
    assert counts["no_room"] <= counts["put"] / 20
    assert CAPACITY / 2 < most <= CAPACITY
    with opened(root, CAPACITY) as store:
        assert store.reconciled.wait(5)
        assert store.stats().bytes == sum(files(root).values())
        assert not leftovers(root)
    return counts


def test_two_processes_under_load(tmp_path: Path) -> None:
    check(tmp_path / "s", 2.0)


def test_two_processes_that_start_together_in_an_empty_folder(tmp_path: Path) -> None:
    for i in range(10):
        root = tmp_path / str(i)

        def start(root: Path = root, i: int = i) -> None:
            with opened(root) as store:
                put(store, key(os.getpid()))
                assert store.stats().rebuilds == 0

        children = [forked(start) for _ in range(3)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        with opened(root) as store:
            assert sorted(i.key for i in store.scan()) == sorted(key(child) for child in children)


def test_an_epoch_raised_in_another_process_stops_writes_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "s"):
        pass

    def erase() -> None:
        with opened(tmp_path / "s") as store:
            store.raise_epoch(A, 1, FOREVER)

    with opened(tmp_path / "s") as store:
        assert store.epoch(A, FOREVER) == 0
    child = forked(erase)
    assert os.waitpid(child, 0)[1] == 0
    with opened(tmp_path / "s") as store:
        with pytest.raises(Rejected, match="stale"):
            put(store, key(1))
        put(store, key(1), epoch=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(dict(check(Path(place) / "s", float(sys.argv[1]))))
