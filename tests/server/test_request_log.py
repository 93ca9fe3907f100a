"""The log finds requests by either id, forgets what it should, and keeps tenants apart."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from kvweave.core.keys import ModelFingerprint
from kvweave.errors import ConfigError, RequestNotFound
from kvweave.server.request_log import Logged, RequestLog
from kvweave.server.shape import RequestShape
from tests.server.shapes import shape, words

SYSTEM = ("system", words(40))


def logged(n: int, of: RequestShape, finished: float = 0.0) -> Logged:
    return Logged(f"chatcmpl-{n}", f"req-{n}", of, finished, of.num_tokens, of.num_tokens, {"number": n})


def ask(seed: int, **options: str) -> RequestShape:
    return shape(SYSTEM, ("user", words(20, seed)), **options)  # type: ignore[arg-type]


def test_both_ids_find_a_record_and_only_for_its_tenant() -> None:
    log = RequestLog()
    log.add("a", logged(1, ask(1)))
    assert log.get("a", "chatcmpl-1") == log.get("a", "req-1") == {"number": 1}
    assert log.shape("a", "req-1") == ask(1)
    for tenant, id in (("b", "req-1"), ("a", "req-2")):
        with pytest.raises(RequestNotFound, match=id):
            log.get(tenant, id)


def test_the_oldest_of_each_tenant_is_forgotten() -> None:
    log = RequestLog(keep=3)
    log.add("b", logged(0, ask(0)))
    for n in range(1, 6):
        log.add("a", logged(n, ask(n)))
    assert [r["number"] for r in log.recent("a", 10)] == [5, 4, 3]
    assert log.get("b", "req-0")
    with pytest.raises(RequestNotFound):
        log.get("a", "req-2")
    found = log.best_match("a", ask(2), 1.0)
    assert found is not None
    assert found.id == "chatcmpl-5"  # not the forgotten one, whose landmarks are gone too


def test_the_longest_common_beginning_wins_and_then_the_last() -> None:
    log = RequestLog()
    for n, prompt in enumerate((ask(1), ask(2), shape(("user", "hi")), ask(1))):
        log.add("a", logged(n, prompt))
    for prompt, wanted in ((ask(2), "chatcmpl-1"), (ask(1), "chatcmpl-3"), (shape(("user", "hi")), "chatcmpl-2")):
        found = log.best_match("a", prompt, 1.0)
        assert found is not None
        assert (found.id, found.shape) == (wanted, log.shape("a", wanted))
    assert log.best_match("b", ask(1), 1.0) is None


def test_a_prompt_that_differs_inside_a_long_message_is_still_found() -> None:
    log = RequestLog()
    log.add("a", logged(1, shape(("system", words(500) + " noon"))))
    log.add("a", logged(2, shape(("user", "hi"))))
    found = log.best_match("a", shape(("system", words(500) + " dawn")), 1.0)
    assert found is not None
    assert found.id == "chatcmpl-1"


def test_a_prompt_with_the_same_question_is_nearer_than_the_last_one() -> None:
    log = RequestLog()
    for n, (system, user) in enumerate([("be brief", "who ?"), ("be brief", "when ?")]):
        log.add("a", logged(n, shape(("system", system), ("user", user))))
    found = log.best_match("a", shape(("system", "be long"), ("user", "who ?")), 1.0)
    assert found is not None
    assert found.id == "chatcmpl-0"


def test_own_salt_and_model_come_first() -> None:
    log = RequestLog()
    log.add("a", logged(1, ask(1, salt="x")))
    other = log.best_match("a", ask(1), 1.0)
    assert other is not None  # another salt's is better than none
    log.add("a", logged(2, ask(2)))
    log.add("a", logged(3, ask(1, salt="x")))
    own = log.best_match("a", ask(1), 1.0)
    assert own is not None
    assert (other.id, own.id) == ("chatcmpl-1", "chatcmpl-2")
    unlike = shape(("user", "something else"), model=ModelFingerprint.of(content="n"))
    assert log.best_match("a", unlike, 1.0) is None


def test_what_finished_later_is_not_what_a_request_is_compared_with() -> None:
    log = RequestLog()
    log.add("a", logged(1, ask(1), finished=10.0))
    assert log.best_match("a", ask(1), 9.0) is None
    assert log.best_match("a", ask(1), 10.0) is not None


def test_erasing_leaves_nothing_of_the_tenant(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    log = RequestLog(path)
    log.add("a", Logged("chatcmpl-findme", "req-1", ask(1), 0.0, 1, 1, {"x": "findmetoo"}))
    log.add("b", logged(2, ask(1)))
    assert log.erase("a") == 1
    assert log.erase("a") == 0
    assert log.best_match("a", ask(1), 1.0) is None
    assert log.get("b", "req-2") == {"number": 2}
    files = b"".join(f.read_bytes() for f in tmp_path.iterdir())
    assert b"findme" not in files
    assert b"chatcmpl-2" in files


def test_a_file_is_private_and_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    log = RequestLog(path)
    log.add("a", logged(1, ask(1)))
    assert {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.iterdir()} == {0o600}
    key = log.key("a")
    log.close()
    again = RequestLog(path)
    assert again.get("a", "req-1") == {"number": 1}
    assert again.key("a") == key
    assert again.key("b") != key
    assert RequestLog().key("a") != key


def test_no_tenant_name_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    log = RequestLog(path)
    log.add("acme-corporation", logged(1, ask(1)))
    log.close()
    assert b"acme" not in path.read_bytes()


def test_files_that_are_no_log_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be looked at " * 100)
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        RequestLog(text)
    assert text.read_text().startswith("not a database")
    with pytest.raises(ConfigError, match="missing"):
        RequestLog(tmp_path / "missing" / "log.sqlite")
    newer = tmp_path / "newer.sqlite"
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="format is 99"):
        RequestLog(newer)


def test_many_threads(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log.sqlite", keep=50)

    def work(seed: int) -> None:
        for i in range(20):
            log.best_match("a", ask(seed), 1.0)
            log.add("a", logged(100 * seed + i, ask(seed)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.recent("a", 100)) == 50
