"""The library over real tiers: restarts, damage on disk, servers that die. What is wrong is a miss, never an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvweave import LLM, Document, SamplingParams, Tiers
from kvweave.core.report import Output
from kvweave.errors import InvalidOption, StoreError, UnknownOption
from kvweave.store.record import decode_header
from tests.store.servers import RedisServer, s3_server

TEXTS = [" ".join(f"word{i}{j}" for j in range(40)) for i in range(3)]
DOCS = [Document(t, id=f"doc:{i}") for i, t in enumerate(TEXTS)]
ASK = SamplingParams(max_tokens=4)


def make(directory: Path, home: Path, tiers: Tiers, **options: Any) -> LLM:
    base = {
        "threads": 1,
        "dtype": "float32",
        "attention": "blocked",
        "min_reuse_tokens": 0,
        "min_chunk": 8,
        "controller": "off",
    }
    return LLM(directory, home=home, tiers=tiers, **(base | options))


def ask(llm: LLM, technique: str = "epic:k=4") -> Output:
    llm.reset_prefix_cache()
    return llm.chat([{"role": "user", "content": [*reversed(DOCS), "word11 or word22?"]}], ASK, technique=technique)


def filled(directory: Path, home: Path, tiers: Tiers, **options: Any) -> None:
    with make(directory, home, tiers, **options) as llm:
        assert sum(p.computed_tokens for p in llm.precompute(DOCS)) > 0


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Output:
    """From memory."""
    with make(tiny_model_dir, tmp_path_factory.mktemp("home"), Tiers()) as llm:
        llm.precompute(DOCS)
        return ask(llm)


@pytest.fixture
def disk(tmp_path: Path) -> Tiers:
    return Tiers(disk=f"{tmp_path / 'store'}:1GiB")


def records(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store").rglob("*.kvr"))


def test_documents_survive_a_restart(tiny_model_dir: Path, tmp_path: Path, disk: Tiers, expected: Output) -> None:
    """Public failures 11, 13, 14: another process, another hash seed, the same records."""
    filled(tiny_model_dir, tmp_path, disk)
    assert len(records(tmp_path)) == 3
    assert {p.stat().st_mode & 0o777 for p in records(tmp_path)} == {0o600}
    with make(tiny_model_dir, tmp_path, disk) as llm:
        assert {p.computed_tokens for p in llm.precompute(DOCS)} == {0}
        out = ask(llm)
        assert [s.tiers for s in out.reuse.segments] == [("disk",)] * 3
        assert out.token_ids == expected.token_ids
        assert out.reuse.fused_tokens == expected.reuse.fused_tokens
        llm.flush()
        assert [s.tiers for s in ask(llm).reuse.segments] == [("host",)] * 3, "moved up"


def test_other_weights_or_settings_find_nothing(tiny_model_dir: Path, tmp_path: Path, disk: Tiers) -> None:
    filled(tiny_model_dir, tmp_path, disk)
    for options in ({"dtype": "bfloat16"}, {"tenant": "other"}, {"anchor": "bos"}):
        with make(tiny_model_dir, tmp_path, disk, **options) as llm:  # type: ignore[arg-type]
            segments = ask(llm).reuse.segments
            found = [s.result for s in segments]
            assert found == ["hit"] * 3 if "anchor" in options else ["miss"] * 3, options
    with make(tiny_model_dir, tmp_path, Tiers(disk=disk.disk, codec="int8")) as llm:
        assert {s.reason for s in ask(llm).reuse.segments} == {"never_seen"}


def spoil_a_row(path: Path) -> None:
    data = bytearray(path.read_bytes())
    header = decode_header(memoryview(bytes(data)), len(data))
    data[header.offsets[2] + 40 * header.row_bytes(2)] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "a bit": (spoil_a_row, {"checksum"}),
    "the header": (lambda p: p.write_bytes(p.read_bytes()[:100] + b"x" + p.read_bytes()[101:]), {"checksum"}),
    "the end": (lambda p: os.truncate(p, p.stat().st_size - 4096), {"short"}),
    "everything": (lambda p: os.truncate(p, 0), {"short"}),
    "another record": (lambda p: p.write_bytes(records(p.parents[5])[0].read_bytes()), {"key"}),
    "no file": (lambda p: p.unlink(), {"never_seen", "evicted"}),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), {"io"}),
    "text": (lambda p: p.write_text("hello"), {"short", "layout"}),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_on_disk_is_a_counted_miss(what: str, tiny_model_dir: Path, tmp_path: Path, disk: Tiers) -> None:
    filled(tiny_model_dir, tmp_path, disk)
    damage, reasons = DAMAGE[what]
    damage(records(tmp_path)[-1])
    with make(tiny_model_dir, tmp_path, disk) as llm:
        out = ask(llm)
        bad = [s for s in out.reuse.segments if s.reason is not None]
        assert [s.reason in reasons for s in bad] == [True]
        assert out.reuse.ran == "fused", "the other two are still of use"
        with make(tiny_model_dir, tmp_path / "other", Tiers()) as memory:  # as if that one had never been stored
            memory.precompute([d for d in DOCS if d.id != bad[0].id])
            assert ask(memory).token_ids == out.token_ids
        computed = [p.computed_tokens for p in llm.precompute(DOCS)]
        if what != "a folder":
            assert sorted(computed)[:2] == [0, 0]
            assert max(computed) > 0
            assert all(s.reason is None for s in ask(llm).reuse.segments), "stored again"


def test_a_redis_server_that_dies_and_comes_back(tiny_model_dir: Path, tmp_path: Path, expected: Output) -> None:
    server = RedisServer(tmp_path)
    server.start()
    tiers = Tiers(remote=f"{server.url}?timeout=500ms", load_timeout=2.0)
    try:
        filled(tiny_model_dir, tmp_path, tiers)
        with make(tiny_model_dir, tmp_path, tiers, chunk_cache=0) as llm:
            out = ask(llm)
            assert [s.tiers for s in out.reuse.segments] == [("redis",)] * 3
            assert out.token_ids == expected.token_ids
            server.kill()
            full = ask(llm, "full")
            start = time.monotonic()
            dead = [ask(llm) for _ in range(3)]
            assert time.monotonic() - start < 10
            assert {o.reuse.ran for o in dead} == {"exact"}
            assert {o.token_ids for o in dead} == {full.token_ids}
            assert {s.reason for o in dead for s in o.reuse.segments} <= {"io", "breaker", "deadline"}
            assert {s.reason for s in dead[-1].reuse.segments} == {"breaker"}, "not asked any more"
    finally:
        server.kill()


def test_s3_and_disk_together(tiny_model_dir: Path, tmp_path: Path, disk: Tiers, expected: Output) -> None:
    with s3_server("kvweave") as endpoint:
        options = "region=us-east-1&allow_http=true&access_key_id=a&secret_access_key=b&timeout=20s"
        both = Tiers(disk=disk.disk, remote=f"s3://kvweave/prefix?endpoint={endpoint}&{options}")
        filled(tiny_model_dir, tmp_path, both)
        for path in records(tmp_path)[:2]:
            path.unlink()
        with make(tiny_model_dir, tmp_path, both, chunk_cache=0) as llm:
            out = ask(llm)
            assert sorted(s.tiers for s in out.reuse.segments) == [("disk",), ("s3",), ("s3",)]
            assert out.token_ids == expected.token_ids
            receipt = llm.erase()
            assert {name: tier.state for name, tier in receipt.tiers.items()} == dict.fromkeys(
                ("host", "disk", "s3"), "deleted"
            )
            assert receipt.tiers["s3"].records == 3
            assert {s.result for s in ask(llm).reuse.segments} == {"miss"}


@pytest.fixture
def child(tiny_model_dir: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that precomputes many documents to disk, saying so after each."""
    program = f"""
import sys
from pathlib import Path
from kvweave import Document, Tiers
from tests.test_tiers import make
with make(Path({str(tiny_model_dir)!r}), Path({str(tmp_path)!r}), Tiers(disk={str(tmp_path / "store")!r})) as llm:
    for i in range(200):
        llm.precompute([Document(" ".join(f"text{{i}}{{j}}" for j in range(40)), id=str(i))])
        print(i, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_kill_9_while_documents_are_precomputed(
    child: subprocess.Popen[str], tiny_model_dir: Path, tmp_path: Path, disk: Tiers
) -> None:
    """Public failure 5: what a killed process left is complete or absent, and answers are those of a cold run."""
    assert child.stdout is not None
    done = 0
    for line in child.stdout:
        done = int(line)
        if done >= 12:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    documents = [Document(" ".join(f"text{i}{j}" for j in range(40)), id=str(i)) for i in range(done + 1)]
    with make(tiny_model_dir, tmp_path, disk) as llm, make(tiny_model_dir, tmp_path / "cold", Tiers()) as cold:
        computed = [p.computed_tokens for p in llm.precompute(documents)]
        assert sum(n > 0 for n in computed) <= 3, "at most what was still queued"
        cold.precompute(documents)
        prompt = [{"role": "user", "content": [*documents[:4], "which?"]}]
        for technique in ("epic:k=4", "cacheblend:ratio=0.2"):
            ours, theirs = (x.chat(prompt, ASK, technique=technique) for x in (llm, cold))
            assert ours.token_ids == theirs.token_ids
            assert ours.reuse.fused_tokens == theirs.reuse.fused_tokens > 0
            for x in (llm, cold):
                x.reset_prefix_cache()


def test_a_full_disk_costs_writes_and_nothing_else(tiny_model_dir: Path, tmp_path: Path, expected: Output) -> None:
    tiers = Tiers(disk=f"{tmp_path / 'store'}:1")
    with make(tiny_model_dir, tmp_path, tiers) as llm:
        llm.precompute(DOCS)
        assert llm.flush(20)
        assert records(tmp_path) == []
        stats = llm.engine.parts.chunks.store.tier_stats()["disk"]  # type: ignore[attr-defined]
        assert stats.counters.puts["no_room"] == 3
        assert ask(llm).token_ids == expected.token_ids


def test_a_tier_that_cant_start_is_an_error_at_start(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("x")
    for tiers, error in (
        (Tiers(disk=file), InvalidOption),
        (Tiers(disk=foreign), InvalidOption),
        (Tiers(remote="redis://127.0.0.1:1/0?timeout=200ms"), StoreError),
        (Tiers(remote="ftp://host/x"), InvalidOption),
        (Tiers(remote="redis://127.0.0.1/0?tiemout=1s"), UnknownOption),
        (Tiers(secret_file=tmp_path / "nothing"), InvalidOption),
        (Tiers(secret_file=file), InvalidOption),
    ):
        with pytest.raises(error):
            make(tiny_model_dir, tmp_path, tiers)
    for wrong in (
        {"codec": "int7"},
        {"eviction": "mru"},
        {"load_timeout": 0},
        {"staging": "x"},
        {"threads": 0},
        {"disk": ":1GiB"},
    ):
        with pytest.raises(InvalidOption):
            Tiers(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownOption, match="Did you mean 'remote'"):
        Tiers.of(remotes="x")


def test_a_relative_folder_and_two_remotes_of_one_kind(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    filled(tiny_model_dir, tmp_path, Tiers(disk="store"))
    assert len(records(tmp_path)) == 3
    server = RedisServer(tmp_path)
    with server.running(), pytest.raises(InvalidOption, match="two of one kind"):
        make(tiny_model_dir, tmp_path, Tiers(remote=(server.url, f"{server.url}?ttl=1d")))


def test_a_secret_separates_and_unites(tiny_model_dir: Path, tmp_path: Path, disk: Tiers) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    keyed = Tiers(disk=disk.disk, secret_file=secret)
    filled(tiny_model_dir, tmp_path, keyed)
    for tiers, result in ((disk, "miss"), (keyed, "hit")):
        with make(tiny_model_dir, tmp_path, tiers) as llm:
            assert {s.result for s in ask(llm).reuse.segments} == {result}


def test_a_profile_is_measured_kept_and_read_again(tiny_model_dir: Path, tmp_path: Path, disk: Tiers) -> None:
    filled(tiny_model_dir, tmp_path, disk, controller="auto")
    (profile,) = (tmp_path / "profiles").iterdir()
    with make(tiny_model_dir, tmp_path, disk, controller="auto") as llm:
        costs = llm.engine.profile.costs()
        assert costs is not None
        assert 0 < costs.prefill(64, 64) < costs.prefill(512, 512)
    profile.write_text("{}")
    with make(tiny_model_dir, tmp_path, disk, controller="auto") as llm:
        assert llm.engine.profile.measured


def test_exactly_what_memory_gives(tiny_model_dir: Path, tmp_path: Path, disk: Tiers) -> None:
    """Fidelity is unchanged bit for bit."""
    filled(tiny_model_dir, tmp_path, disk)
    prompt = [{"role": "user", "content": [*DOCS[::-1], "which?"]}]
    with make(tiny_model_dir, tmp_path, disk, chunk_cache=0) as far, make(tiny_model_dir, tmp_path, Tiers()) as near:
        near.precompute(DOCS)
        for technique in ("naive", "raw", "epic:ratio=0.3", "random", "cacheblend", "question"):
            a, b = (x.score(prompt, [5, 6, 7], technique=technique) for x in (far, near))
            assert torch.equal(a.logits, b.logits), technique
            for x in (far, near):
                x.reset_prefix_cache()
