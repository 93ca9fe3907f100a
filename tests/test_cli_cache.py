"""``kvweave cache`` and ``precompute``, and ``ask`` with tiers: what is stored is loaded later, and can be looked after."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors import safe_open

from kvweave.cli import main
from kvweave.cli.app import app
from kvweave.cli.units import show_bytes, show_span

NAMES = ("anchor", "bridge", "castle")
COMMANDS = ("ls", "stats", "inspect", "verify", "pin", "unpin", "rm", "erase", "export", "import")
PAGE = Path(__file__).parents[1] / "docs" / "tiers.md"


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line on stderr."""
        (line,) = self.err.splitlines()
        assert line.startswith("kvweave: "), line
        return line

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith("KVWEAVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def call(*args: object) -> Ran:
        code = main([str(a) for a in args])
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.md").write_text(f"# The {name}\n" + f"Nobody knows who built the {name}. " * 12)
    return folder


@pytest.fixture
def precompute(cli: Callable[..., Ran], docs: Path, tiny_model_dir: Path) -> Callable[..., Ran]:
    def call(*args: object, files: Path = docs) -> Ran:
        return cli("precompute", files, "--model", tiny_model_dir, "--threads", 1, *args)

    return call


@pytest.fixture
def ask(cli: Callable[..., Ran], docs: Path, tiny_model_dir: Path) -> Callable[..., Ran]:
    def call(*args: object) -> Ran:
        return cli("ask", "--docs", docs, "Who?", "--model", tiny_model_dir, "--threads", 1, "--max-tokens", 4, *args)

    return call


@pytest.fixture
def cache(cli: Callable[..., Ran]) -> Callable[..., Ran]:
    """One command on the folder ``kv``; JSON unless it is told otherwise."""

    def call(command: str, *args: object, json: bool = True, store: object = "kv") -> Ran:
        return cli("cache", command, *args, "--store", store, *(["--json"] if json else []))

    return call


def records(root: Path) -> list[Path]:
    return sorted(root.glob("v1/*/*/*/*.kvr"))


# --- usage ----------------------------------------------------------------------------------------------------------------


def test_mistakes_are_told_without_loading_torch(docs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    script = f"""
import sys
from kvweave.cli import main
help = [main(args) for args in (["cache"], ["cache", "--help"], ["cache", "ls", "--help"], ["precompute", "--help"])]
usage = [main(args) for args in (
    ["precompute", {str(docs)!r}],
    ["precompute", {str(docs)!r}, "--disk-tier", ""],
    ["precompute", {str(docs)!r}, "--disk-tier", "kv", "--to", "tape"],
    ["ask", "--docs", {str(docs)!r}, "Who?", "--codec", "zip"],
)]
assert not {{"torch", "numpy"}} & set(sys.modules)
usage += [main(["cache", *args]) for args in (
    ["ls"], ["ls", "--store", "nowhere"], ["ls", "--store", "file"], ["rm", "--store", "docs"], ["nonsense"],
    ["pin", "abc", "--store", "docs"], ["ls", "xyz", "--store", "docs"], ["ls", "--older-than", "old"],
)]
assert help == [0] * 4, help
assert usage == [2] * 12, usage
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["docs", "file"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["cache", "nonsense"], "No such command"),
        (["cache", "ls"], "--store"),
        (["cache", "ls", "--store", "nowhere"], "doesn't exist"),
        (["cache", "ls", "--store", "docs/anchor.md"], "is a file"),
        (["cache", "stats", "--store", "docs"], "isn't a store"),
        (["cache", "import", "x.tar", "--store", "docs"], "isn't a store"),
        (["cache", "import", "x.tar", "--store", "docs", "--create"], "not empty"),
        (["cache", "inspect", "--store", "kv"], "KEY"),
        (["cache", "inspect", "nokey", "--store", "kv"], "no key"),
        (["cache", "ls", "--scope", "x", "--store", "kv"], "no scope"),
        (["cache", "ls", "--scope", "ab", "--tenant", "ada", "--store", "kv"], "same thing"),
        (["cache", "ls", "--sort", "name", "--store", "kv"], "--sort"),
        (["cache", "ls", "--older-than", "7", "--store", "kv"], "span of time"),
        (["cache", "pin", "ab", "--store", "kv"], "--for"),
        (["cache", "rm", "--yes", "--store", "kv"], "Which records"),
        (["cache", "rm", "--all", "--model", "ab", "--store", "kv"], "contradicts"),
        (["cache", "unpin", "--store", "kv"], "Which records"),
        (["cache", "ls", "--tenant", "ada", "--secret-file", "nowhere", "--store", "kv"], "can't be read"),
        (["cache", "erase", "ada", "--secret-file", "docs/short", "--store", "kv"], "has 5 bytes"),
        (["precompute", "docs"], "no tier"),
        (["precompute", "docs", "--to", "disk"], "--disk-tier"),
        (["precompute", "docs", "--to", "remote", "--disk-tier", "kv"], "--remote-tier"),
        (["precompute", "docs", "--to", "disc", "--disk-tier", "kv"], "Did you mean 'disk'"),
        (["precompute", "docs", "--disk-tier", "kv:9lots"], "not a size"),
        (["precompute", "docs", "--disk-tier", "kv", "--codec", "zip"], "codec"),
        (["precompute", "--disk-tier", "kv"], "FILES"),
        (["ask", "--docs", "docs", "Who?", "--controller", "on"], "--controller"),
        (["ask", "--docs", "docs", "Who?", "--disk-tier", "kv", "--secret-file", "docs/short"], "has 5 bytes"),
    ],
)
def test_usage_errors(cli: Callable[..., Ran], docs: Path, args: list[str], words: str) -> None:
    (docs / "short").write_text("short")
    ran = cli(*args)
    assert ran.code == 2
    assert words in ran.complaint
    assert ran.out == ""
    assert not Path("kv").exists()


def test_the_page_names_commands_and_options_that_exist() -> None:
    top = typer.main.get_command(app)
    text = PAGE.read_text()
    lines = [line[2:].partition(" #")[0].split() for line in text.splitlines() if line.startswith("$ kvweave ")]
    assert {words[2] for words in lines if words[1] == "cache"} == set(COMMANDS)
    for _, name, *rest in lines:
        command = top.commands[name]  # type: ignore[attr-defined]
        if name == "cache":
            command = command.commands[rest[0]]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in rest if word.startswith("-")} <= options, (name, rest)


def test_units() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1024, 1.5 * 2**20, 2**50)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "1.5 MiB",
        "1,024.0 TiB",
    ]
    assert [show_span(n) for n in (0.5, 1, 90, 7200, 86400 * 3)] == ["now", "1 s", "2 min", "2 h", "3 d"]


# --- precompute and ask ---------------------------------------------------------------------------------------------------


def test_what_was_precomputed_is_loaded_by_another_process(
    precompute: Callable[..., Ran], ask: Callable[..., Ran], tmp_path: Path
) -> None:
    first = precompute("--disk-tier", "kv:1GiB", "--json")
    assert (first.code, first.err) == (0, "")
    done = first.document
    assert (done["computed"], done["already_there"], done["failed"], done["complete"]) == (3, 0, 0, True)
    assert done["computed_tokens"] > 1000
    assert done["tiers"]["disk"]["written"] == len(records(tmp_path / "kv")) == 3
    assert done["tiers"]["disk"]["bytes"] == sum(p.stat().st_size for p in records(tmp_path / "kv"))
    assert [(d["id"], d["state"]) for d in done["documents"]] == [(name, "computed") for name in NAMES]

    again = precompute("--disk-tier", "kv", "--json").document
    assert (again["computed"], again["already_there"], again["computed_tokens"]) == (0, 3, 0)
    answer = ask("--disk-tier", "kv", "--json").document
    assert answer["prefilled"]["tokens"] == 0
    load = answer["reuse"]["loads"]["disk"]
    assert load["chunks"] == 3
    assert load["bytes"] > 0
    assert "load_wait_ms" in answer["reuse"]["timings"]
    assert answer["reuse"]["cached_tokens"] + answer["reuse"]["fused_tokens"] > 1000
    assert not ask("--json").document["reuse"]["loads"].get("disk")


def test_a_second_ask_loads(ask: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_DISK_TIER", "kv:1GiB")
    first = ask("--json", "--technique", "naive").document
    assert first["prefilled"]["tokens"] > 1000
    assert not first["reuse"]["loads"].get("disk")
    second = ask("--json", "--technique", "naive", "--dtype", "float32").document
    assert second["prefilled"]["tokens"] > 1000, "another dtype is another model"
    second = ask("--json", "--technique", "naive").document
    assert second["prefilled"]["tokens"] == 0
    assert second["reuse"]["loads"]["disk"]["chunks"] == 3
    assert second["answer"] == first["answer"]
    assert second["reuse"]["controller"] is None, "one load isn't enough to decide by"
    for _ in range(2):
        ask("--technique", "naive")
    third = ask("--technique", "naive", "--controller", "auto")
    assert (third.code, third.err) == (0, "")
    assert "3 documents were there already" in third.out
    assert re.search(
        r"loaded from disk: 3 chunks of [\d,]+ tokens, .*KiB in [\d,]+ ms of I/O; waited for [\d,]+ ms", third.out
    )
    assert "controller 'auto': " in third.out
    off = ask("--json", "--controller", "off").document
    assert off["reuse"]["controller"] is None
    assert ask("--json", "--tenant", "ada").document["prefilled"]["tokens"] > 1000
    assert ask("--json", "--disk-tier", "").document["prefilled"]["tokens"] > 1000, "a flag beats the environment"


def test_lossy_records(ask: Callable[..., Ran], cache: Callable[..., Ran]) -> None:
    for _ in range(2):
        answer = ask("--json", "--codec", "int8", "--disk-tier", "kv").document
    assert answer["reuse"]["loads"]["disk"]["chunks"] == 3
    assert answer["reuse"]["cached_tokens"] == 0, "nothing lossy is exact"
    assert {r["codec"] for r in cache("ls").document["records"]} == {"int8"}


def test_documents_that_cannot_be_computed(precompute: Callable[..., Ran], docs: Path) -> None:
    (docs / "long.txt").write_text("x" * 9000)
    (docs / "tiny.txt").write_text("short")
    ran = precompute("--disk-tier", "kv", "--json")
    assert ran.code == 1
    done = ran.document
    assert {d["id"]: d["state"] for d in done["documents"]} == {
        **dict.fromkeys(NAMES, "computed"),
        "long": "failed",
        "tiny": "too_short",
    }
    (failed,) = (d for d in done["documents"] if d["state"] == "failed")
    assert "9,000 tokens" in failed["error"]
    text = precompute("--disk-tier", "kv")
    assert text.code == 1
    assert "0 computed (0 tokens), 3 already there, 1 too short to be kept, 1 failed" in text.out
    assert "long" in text.out


def test_what_a_tier_does_not_take_is_told(precompute: Callable[..., Ran]) -> None:
    ran = precompute("--disk-tier", "tiny:10KiB", "--json")
    assert ran.code == 1
    assert "didn't take 3 records (no_room: 3)" in ran.err
    assert not ran.document["complete"]
    assert ran.document["tiers"]["disk"]["failed"] == {"no_room": 3}


def test_targets(precompute: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_DISK_TIER", "kv")
    ran = precompute("--to", "host", "--json")
    assert (ran.code, ran.document["computed"], ran.document["tiers"]) == (0, 3, {})
    assert not Path("kv").exists()
    assert precompute("--to", "disk", "--to", "host", "--quiet").out == ""
    assert len(records(Path("kv"))) == 3
    monkeypatch.setenv("KVWEAVE_REMOTE_TIER", "ftp://somewhere")
    assert precompute("--to", "disk").code == 0
    ran = precompute()
    assert ran.code == 2
    assert "ftp://somewhere" in ran.complaint


def test_a_tier_that_is_not_a_folder(precompute: Callable[..., Ran], docs: Path) -> None:
    ran = precompute("--disk-tier", docs)
    assert (ran.code, ran.out) == (2, "")
    assert "isn't a store" in ran.complaint


def test_ctrl_c_then_go_on(tiny_model_dir: Path, tmp_path: Path, cli: Callable[..., Ran]) -> None:
    """A real signal to a real process: what was computed is stored, nothing is half there, and the rest follows later."""
    for number in range(24):
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / "many" / f"{number:02}.txt").write_text(f"{number} bottles of water on the wall. " * 40)
    args = ["precompute", "many", "--model", str(tiny_model_dir), "--threads", "1", "--disk-tier", "kv", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvweave", *args, "--log-level", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = 0
    for line in process.stderr:
        seen += "computed," in line
        if seen == 3:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    done = json.loads(out)
    assert process.returncode == 1
    assert err.splitlines()[-1].endswith("documents are left. The store is fine; run the same again to go on.")
    assert done["interrupted"]
    assert not done["complete"]
    assert 3 <= done["computed"] < 24
    assert done["computed"] + done["not_reached"] == 24
    assert done["tiers"]["disk"]["written"] == len(records(tmp_path / "kv"))
    assert not list((tmp_path / "kv").rglob(".tmp-*"))
    checked = cli("cache", "verify", "--store", "kv", "--json").document
    assert (checked["checked"], checked["damaged"]) == (len(records(tmp_path / "kv")), [])

    rest = cli(*args).document
    assert (rest["already_there"], rest["computed"]) == (done["computed"], done["not_reached"])
    assert rest["complete"]


# --- looking after a store ------------------------------------------------------------------------------------------------


@pytest.fixture
def full(precompute: Callable[..., Ran], tmp_path: Path) -> Path:
    """A store with the documents of two tenants."""
    for tenant in ("ada", "bob"):
        assert precompute("--disk-tier", "kv:64MiB", "--tenant", tenant).code == 0
    assert len(records(tmp_path / "kv")) == 6
    return tmp_path / "kv"


def test_listing(cache: Callable[..., Ran], full: Path) -> None:
    listed = cache("ls").document
    assert listed["total"] == len(listed["records"]) == 6
    assert listed["bytes"] == sum(p.stat().st_size for p in records(full))
    for item in listed["records"]:
        assert (full / "v1" / f"{item['name']}.kvr").stat().st_size == item["bytes"]
        assert item["tokens"] > 300
        assert item["damage"] is item["pinned_until"] is None
    assert cache("ls", "--tenant", "ada").document["total"] == 3
    assert cache("ls", "--tenant", "nobody").document["total"] == 0
    assert cache("ls", "--older-than", "1d").document["total"] == 0
    assert len(cache("ls", "--limit", 2).document["records"]) == 2
    text = cache("ls", "--limit", 2, json=False)
    assert (text.code, text.err) == (0, "")
    assert "6 records" in text.out
    assert "2 of 6 are shown" in text.out
    key = listed["records"][0]["key"]
    assert cache("ls", key[:10]).document["records"][0]["key"] == key


def test_statistics(cache: Callable[..., Ran], full: Path) -> None:
    stats = cache("stats").document
    assert (stats["records"], stats["capacity"], stats["unreadable"], stats["processes"]) == (6, 64 * 2**20, 0, 0)
    assert [share["records"] for share in stats["scopes"].values()] == [3, 3]
    text = cache("stats", json=False)
    assert text.code == 0
    assert all(word in text.out for word in ("6: ", "64.0 MiB", *stats["scopes"], *stats["models"]))


def test_one_record(cache: Callable[..., Ran], full: Path, tmp_path: Path) -> None:
    key = cache("ls").document["records"][0]["key"]
    ran = cache("inspect", key[:12], "--export", "one.safetensors")
    found = ran.document
    assert (ran.code, found["key"], found["verified"], found["exported"]) == (0, key, "ok", "one.safetensors")
    with safe_open("one.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        assert len(file.keys()) == 2 * found["layers"] + 2
        assert file.get_tensor("token_ids").shape == (found["tokens"],)
        assert file.get_tensor("layers.0.keys").shape[1] == found["tokens"]
    assert "verified" in cache("inspect", key, json=False).out
    again = cache("inspect", key, "--export", "one.safetensors")
    assert again.code == 1
    assert "--force" in again.complaint
    assert cache("inspect", key, "--export", "one.safetensors", "--force").code == 0
    missing = cache("inspect", "0123456789")
    assert (missing.code, missing.out) == (1, "")
    assert "no record" in missing.complaint
    prefixes = [path.stem[0] for path in records(full)]
    if twice := [p for p in prefixes if prefixes.count(p) > 1]:
        assert cache("inspect", twice[0]).code == 2


def test_damage_is_exit_code_3(cache: Callable[..., Ran], ask: Callable[..., Ran], full: Path) -> None:
    assert cache("verify").code == cache("verify", "--headers").code == 0
    path = records(full)[0]
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    os.truncate(records(full)[1], 1000)
    ran = cache("verify")
    assert ran.code == 3
    assert {d["reason"] for d in ran.document["damaged"]} <= {"checksum", "short"}
    assert path.stem in {d["key"] for d in ran.document["damaged"]}
    assert cache("verify", "--headers").document["damaged"][0]["reason"] == "short"
    assert cache("inspect", path.stem).code == 3
    text = cache("verify", "--repair", json=False)
    assert text.code == 3
    assert "2 were taken away" in text.out
    assert cache("verify").code == 0
    assert len(records(full)) == 4
    assert cache("stats").document["damaged_files"] == 2


def test_pins(cache: Callable[..., Ran], full: Path) -> None:
    ran = cache("pin", "--tenant", "ada", "--for", "7d")
    assert (ran.code, ran.document["pinned"]) == (0, 3)
    assert abs(ran.document["until"] - time.time() - 7 * 86400) < 60
    assert cache("ls", "--pinned").document["total"] == 3
    assert "7 d" in cache("ls", json=False).out
    dry = cache("rm", "--all").document
    assert (dry["chosen"], dry["pinned_kept"], dry["removed"], dry["dry_run"]) == (3, 3, 0, True)
    assert cache("unpin", "--all").document["unpinned"] == 3
    assert cache("pin", "0123456789", "--for", "7d").code == 1


def test_removal_asks_first(cache: Callable[..., Ran], full: Path) -> None:
    dry = cache("rm", "--tenant", "ada", json=False)
    assert dry.code == 0
    assert "3 records" in dry.out
    assert "--yes" in dry.out
    assert len(records(full)) == 6
    ran = cache("rm", "--tenant", "ada", "--yes")
    assert ran.document["removed"] == 3
    assert len(records(full)) == 3
    cache("pin", "--tenant", "bob", "--for", "1h")
    assert cache("rm", "--all", "--yes").document["removed"] == 0
    assert cache("rm", "--all", "--yes", "--pinned").document["removed"] == 3
    assert not records(full)
    assert cache("rm", "--all", "--yes").document["removed"] == 0


def test_erasure(cache: Callable[..., Ran], precompute: Callable[..., Ran], full: Path) -> None:
    unknown = cache("erase", "adda", "--yes")
    assert (unknown.code, unknown.out) == (1, "")
    assert "adda" in unknown.complaint
    dry = cache("erase", "ada").document
    assert (dry["dry_run"], dry["records"]) == (True, 3)
    assert len(records(full)) == 6
    receipt = cache("erase", "ada", "--yes").document
    assert receipt["tiers"]["disk"]["records"] == 3
    assert receipt["epoch"] > 0
    assert receipt["pending"] == []
    assert len(receipt["digest"]) == 64
    assert len(records(full)) == 3
    assert "Receipt erase-" in cache("erase", "ada", "--yes", json=False).out
    assert cache("erase", "adda", "--yes", "--force").document["tiers"]["disk"]["records"] == 0
    again = precompute("--disk-tier", "kv", "--tenant", "ada", "--json").document
    assert again["computed"] == 3, "under a new key"


def test_secrets_key_the_tenants(cache: Callable[..., Ran], precompute: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(range(32)))
    assert precompute("--disk-tier", "kv", "--tenant", "ada", "--secret-file", "secret").code == 0
    assert cache("ls", "--tenant", "ada").document["total"] == 0
    assert cache("ls", "--tenant", "ada", "--secret-file", "secret").document["total"] == 3
    assert cache("erase", "ada", "--yes").code == 1
    assert cache("erase", "ada", "--yes", "--secret-file", "secret").document["tiers"]["disk"]["records"] == 3


def test_archives(cache: Callable[..., Ran], precompute: Callable[..., Ran], full: Path, tmp_path: Path) -> None:
    done = cache("export", "ada.tar", "--tenant", "ada").document
    assert (done["records"], done["skipped"]) == (3, {})
    assert stat.S_IMODE(Path("ada.tar").stat().st_mode) == 0o600
    assert done["archive_bytes"] == Path("ada.tar").stat().st_size
    assert cache("export", "ada.tar").code == 1
    assert cache("export", "no/such/place.tar").code == 1
    added = cache("import", "ada.tar", "--create", store="new").document
    assert (added["added"], added["present"], added["skipped"]) == (3, 0, {})
    assert "3 were there already" in cache("import", "ada.tar", store="new", json=False).out
    assert precompute("--disk-tier", "new", "--tenant", "ada", "--json").document["already_there"] == 3

    data = Path("ada.tar").read_bytes()
    Path("cut.tar").write_bytes(data[: len(data) // 2])
    broken = cache("import", "cut.tar", "--create", store="other")
    assert (broken.code, broken.out) == (1, "")
    assert "not a whole archive" in broken.complaint
    assert cache("verify", store="other").code == 0
    assert cache("import", "nowhere.tar").code == 1
    cache("erase", "ada", "--yes", store="new")
    stale = cache("import", "ada.tar", store="new", json=False)
    assert stale.code == 1
    assert "erased: 3" in stale.out


def test_while_an_engine_uses_the_folder(cache: Callable[..., Ran], full: Path, docs: Path, tiny_model_dir: Path) -> None:
    from kvweave import LLM, Document, Tiers

    documents = [Document((docs / f"{name}.md").read_text().strip(), id=name) for name in NAMES]
    with LLM(
        os.fspath(tiny_model_dir), threads=1, tenant="ada", technique="naive", controller="off", tiers=Tiers(disk=full)
    ) as llm:
        assert all(item.computed_tokens == 0 for item in llm.precompute(documents)), "found"
        assert cache("stats").document["processes"] == 1
        assert cache("verify").code == 0
        answer = llm.chat([{"role": "user", "content": [*documents, "Who?"]}])
        assert answer.reuse.loads["disk"].chunks == 3
        assert re.search(r'loads_total{[^}]*result="ok",tier="disk"} 3.0', llm.metrics())
        assert cache("rm", "--all", "--yes").document["removed"] == 6
        answer = llm.chat([{"role": "user", "content": [*reversed(documents), "Where?"]}])
        assert answer.text
        assert llm.precompute(documents)
        assert llm.flush(10)
        assert cache("ls").document["total"] in (0, 3), "written again from memory, or computed"
        cache("erase", "ada", "--yes")
        time.sleep(1.1)
        assert all(item.computed_tokens > 0 for item in llm.precompute(documents)), "erased for running engines too"


def test_the_store_of_the_environment(
    cli: Callable[..., Ran], full: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVWEAVE_DISK_TIER", f"{full}:64MiB")
    assert cli("cache", "ls", "--json").document["total"] == 6
    shutil.rmtree(full)
    ran = cli("cache", "ls")
    assert ran.code == 2
    assert "doesn't exist" in ran.complaint
    assert not full.exists(), "looking creates nothing"
