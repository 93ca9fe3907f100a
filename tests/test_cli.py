"""The command line: exit codes, one-line errors, pure JSON, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvweave.cli import main
from kvweave.cli.ask import TECHNIQUES
from kvweave.errors import SelfCheckFailed

NAMES = ("anchor", "bridge", "castle")
LINE = re.compile(r"prompt ([\d,]+) = exact ([\d,]+) \+ fused ([\d,]+) \+ recomputed ([\d,]+) \+ new ([\d,]+)")


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


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith("KVWEAVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
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
def ask(cli: Callable[..., Ran], docs: Path, tiny_model_dir: Path) -> Callable[..., Ran]:
    def call(*args: object, model: Path = tiny_model_dir, docs: Path = docs) -> Ran:
        return cli("ask", "--docs", docs, "Who?", "--model", model, "--threads", 1, "--max-tokens", 4, *args)

    return call


# --- before anything is loaded ----------------------------------------------------------------------------------------


def test_answers_without_loading_torch(docs: Path) -> None:
    script = f"""
import sys
from kvweave.cli import main
codes = [main(args) for args in (
    ["--version"], [], ["ask", "--help"], ["models"], ["models", "--json"], ["nonsense"], ["ask"],
    ["ask", "--docs", "nowhere", "Who?"],
    ["ask", "--docs", {str(docs)!r}, "Who?", "--technique", "epik"],
    ["ask", "--docs", {str(docs)!r}, "Who?", "--top-p", "7"],
    ["ask", "--docs", {str(docs)!r}, "Who?", "--kv-pool", "lots"],
)]
assert codes == [0, 0, 0, 0, 0, 2, 2, 1, 2, 2, 2], codes
loaded = {{"torch", "transformers", "numpy"}} & set(sys.modules)
assert not loaded, loaded
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nonsense"], 2, "No such command"),
        (["modles"], 2, "models"),
        (["ask", "Who?"], 2, "--docs"),
        (["ask", "--docs", "DOCS"], 2, "QUESTION"),
        (["ask", "--docs", "DOCS", " "], 2, "question is empty"),
        (["ask", "--docs", "DOCS/anchor.md", "DOCS/bridge.md"], 2, "last word"),
        (["ask", "--docs", "DOCS", "Who\udcff?"], 2, "UTF-8"),
        (["ask", "--docs", "DOCS", "Who?", "--no-such"], 2, "--no-such"),
        (["ask", "--docs", "DOCS", "Who?", "--max-tokens", "many"], 2, "--max-tokens"),
        (["ask", "--docs", "DOCS", "Who?", "--max-tokens", "-1"], 2, "max_tokens"),
        (["ask", "--docs", "DOCS", "Who?", "--temperature", "nan"], 2, "temperature"),
        (["ask", "--docs", "DOCS", "Who?", "--stop", ""], 2, "stop"),
        (["ask", "--docs", "DOCS", "Who?", "--reuse", "some"], 2, "fused"),
        (["ask", "--docs", "DOCS", "Who?", "--technique", "epik"], 2, "Did you mean 'epic'"),
        (["ask", "--docs", "DOCS", "Who?", "--threads", "0"], 2, "threads"),
        (["ask", "--docs", "DOCS", "Who?", "--threads", "some"], 2, "threads"),
        (["ask", "--docs", "DOCS", "Who?", "--device", "tpu"], 2, "device"),
        (["ask", "--docs", "DOCS", "Who?", "--dtype", "float31"], 2, "Did you mean 'float32'"),
        (["ask", "--docs", "DOCS", "Who?", "--anchor", "tail"], 2, "anchor"),
        (["ask", "--docs", "DOCS", "Who?", "--kv-pool", "-1GiB"], 2, "not a size"),
        (["ask", "--docs", "DOCS", "Who?", "--chunk-cache", "lots"], 2, "not a size"),
        (["ask", "--docs", "DOCS", "Who?", "--max-model-len", "1"], 2, "max_model_len"),
        (["models", "--log-level", "loud"], 2, "loud"),
        (["doctor", "--device", "cuda:x"], 2, "device"),
    ],
)
def test_usage_errors(cli: Callable[..., Ran], docs: Path, args: list[str], code: int, words: str) -> None:
    ran = cli(*(a.replace("DOCS", str(docs)) for a in args))
    assert ran.code == code
    assert words in ran.complaint
    assert ran.out == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ratio", "1.5"], "between 0 and 1"),
        (["--ratio", "-0.1"], "between 0 and 1"),
        (["--ratio", "nan"], "between 0 and 1"),
        (["--technique", "cacheblend", "--ratio", "2"], "between 0 and 1"),
        (["--technique", "cacheblend:rato=0.1"], "Did you mean 'ratio'"),
        (["--technique", "epic:k=some"], "not a number"),
        (["--technique", "epic:k"], "no value"),
        (["--technique", "full", "--ratio", "0.1"], "'ratio' is not an option"),
        (["--reuse", "exact", "--technique", "epic"], "fused reuse"),
    ],
)
def test_technique_options_are_checked_before_the_model(ask: Callable[..., Ran], args: list[str], words: str) -> None:
    ran = ask(*args, model=Path("/nowhere"))
    assert ran.code == 2
    assert words in ran.complaint


def _nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def _no_documents(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_nothing, "does not exist"),
        (_no_documents, "docs"),
        (lambda folder: (folder / "bridge.md").write_text(" \n"), "bridge.md' is empty"),
        (lambda folder: (folder / "bridge.md").write_bytes(b"\x7fELF\0\0"), "not a text file"),
        (lambda folder: (folder / "bridge.md").write_bytes(b"caf\xe9"), "not UTF-8"),
        (lambda folder: (folder / "bridge.jsonl").write_text("{nonsense"), "line 1 is not JSON"),
    ],
)
def test_unusable_documents(ask: Callable[..., Ran], docs: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoil(docs)
    ran = ask()
    assert ran.code == 1
    assert words in ran.complaint
    assert ran.out == ""


def test_documents_behind_the_option_and_in_front_of_the_question(
    cli: Callable[..., Ran], docs: Path, tiny_model_dir: Path
) -> None:
    files = [docs / f"{name}.md" for name in ("castle", "anchor", "bridge")]
    ran = cli("ask", "--docs", *files, "Who?", "--model", tiny_model_dir, "--threads", 1, "--max-tokens", 1, "--json")
    assert [d["path"] for d in json.loads(ran.out)["documents"]] == [str(f) for f in files]


# --- environment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["models"], ["doctor", "--no-model"], ["ask", "--docs", "nowhere", "Who?"]])
def test_an_unknown_variable_stops_the_start(
    cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("KVWEAVE_HOEM", "/tmp")
    ran = cli(*command)
    assert ran.code == 2
    assert "Did you mean 'KVWEAVE_HOME'" in ran.complaint
    assert ran.out == ""


def test_home_comes_from_the_environment(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    ran = cli("doctor", "--no-model", "--threads", 1, "--json")
    assert ran.code == 0
    assert {c["name"]: c["detail"] for c in json.loads(ran.out)["checks"]}["home"] == str(tmp_path / "home")
    assert not (tmp_path / "home").exists()

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "file"))
    ran = cli("doctor", "--no-model", "--threads", 1, "--json")
    assert ran.code == 3
    assert not json.loads(ran.out)["ok"]


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_there(ask: Callable[..., Ran], tmp_path: Path) -> None:
    for name in (tmp_path / "nowhere", tmp_path / "x.gguf", "nonsense"):
        ran = ask(model=name)
        assert ran.code == 1
        assert "Give 'demo'" in ran.complaint


def test_broken_and_refused_models(ask: Callable[..., Ran], tiny_model_dir: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_model_dir, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    ran = ask(model=broken)
    assert (ran.code, ran.out) == (1, "")
    assert "model.safetensors" in ran.complaint

    refused = shutil.copytree(tiny_model_dir, tmp_path / "refused")
    config = json.loads((refused / "config.json").read_text())
    (refused / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    ran = ask(model=refused)
    assert (ran.code, ran.out) == (1, "")
    assert "'gpt2' are refused" in ran.complaint

    (refused / "tokenizer.json").write_text("{}")
    (refused / "config.json").write_text(json.dumps(config))
    ran = ask(model=refused)
    assert (ran.code, ran.out) == (1, "")
    assert "tokenizer" in ran.complaint


# --- answers ----------------------------------------------------------------------------------------------------------


def test_the_answer_and_its_accounting(ask: Callable[..., Ran]) -> None:
    ran = ask()
    assert (ran.code, ran.err) == (0, "")
    match = LINE.search(ran.out)
    assert match
    prompt, *parts = (int(group.replace(",", "")) for group in match.groups())
    assert prompt == sum(parts)
    assert parts[1] > 0, "nothing was fused"
    assert "first token after" in ran.out

    quiet = ask("--quiet")
    assert quiet.out == ran.out[: match.start()].rstrip("\n") + "\n"


def test_json_is_one_document_whatever_is_printed_meanwhile(
    ask: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvweave.llm import LLM

    render = LLM.render

    def noisy(self: LLM, messages: Any) -> Any:
        print("a library that prints")
        return render(self, messages)

    monkeypatch.setattr(LLM, "render", noisy)
    ran = ask("--json", "--compare", "--technique", "cacheblend", "--ratio", 0.2)
    assert ran.code == 0
    document = json.loads(ran.out)
    assert "a library that prints" in ran.err
    assert [d["id"] for d in document["documents"]] == list(NAMES)
    reuse, compare = document["reuse"], document["compare"]
    classes = [reuse[f"{kind}_tokens"] for kind in ("cached", "fused", "recomputed", "prefilled")]
    assert sum(classes) == reuse["prompt_tokens"]
    assert (reuse["ran"], reuse["technique"], reuse["ratio"]) == ("fused", "cacheblend", 0.2)
    assert compare["reuse"]["prefilled_tokens"] == compare["reuse"]["prompt_tokens"] == reuse["prompt_tokens"]
    assert compare["first_token_kl"] >= 0
    assert compare["same_text"] == (compare["answer"] == document["answer"])


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_comparison_tells_exact_from_approximate(ask: Callable[..., Ran], technique: str) -> None:
    document = json.loads(ask("--json", "--compare", "--technique", technique, "--dtype", "float32").out)
    compare = document["compare"]
    if document["reuse"]["ran"] == "fused":
        assert compare["first_token_kl"] > 1e-6
        assert document["prefilled"]["tokens"] > 0
    else:
        assert technique in ("full", "prefix")
        assert compare["first_token_kl"] < 1e-6
        assert compare["same_text"]
        assert document["prefilled"] is None


def test_a_sampled_comparison_draws_the_same_numbers(ask: Callable[..., Ran]) -> None:
    ran = ask("--json", "--compare", "--technique", "full", "--temperature", 1, "--top-k", 50)
    assert json.loads(ran.out)["compare"]["same_text"]


def test_without_a_chat_template(ask: Callable[..., Ran], tiny_model_dir: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(tiny_model_dir, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template*"))
    ran = ask(model=plain)
    assert (ran.code, ran.err) == (0, "")
    assert LINE.search(ran.out)


@pytest.mark.parametrize("option", ["--max-model-len", "--kv-pool"])
def test_too_many_documents(ask: Callable[..., Ran], docs: Path, option: str) -> None:
    """The number in the message is the number that fits."""
    room = 900 if option == "--max-model-len" else f"{900 * 1024}"  # 1,024 bytes a token in float32
    ran = ask(option, room, "--dtype", "float32")
    assert ran.code == 1
    match = re.search(r"the first (\d) of 3 documents fit", ran.complaint)
    assert match
    for extra in NAMES[int(match[1]) :]:
        (docs / f"{extra}.md").unlink()
    assert ask(option, room, "--dtype", "float32").code == 0

    (docs / "anchor.md").write_text("far too long " * 100)
    assert "not even the first document fits" in ask(option, room, "--dtype", "float32").complaint


def test_document_names_may_hold_anything(ask: Callable[..., Ran], docs: Path) -> None:
    for number, name in enumerate(("été à la mer.md", "ete_a_la_mer.md", "@[bold]%s{}.txt")):
        (docs / name).write_text(f"Document {number}. " * 30)
    documents = json.loads(ask("--json", "--max-tokens", 0).out)["documents"]
    assert len({d["id"] for d in documents}) == len(NAMES) + 3


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_self_check_is_exit_code_3(ask: Callable[..., Ran], cli: Callable[..., Ran], tiny_model_dir: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvweave.engine.build.self_check", _no)
        ran = ask()
        assert (ran.code, ran.out) == (3, "")
        assert "layer 2" in ran.complaint
        ran = cli("doctor", "--model", tiny_model_dir, "--threads", 1, "--json")
    assert ran.code == 3
    report = json.loads(ran.out)
    assert [c["name"] for c in report["checks"] if not c["ok"]] == ["model"]
    assert report["model"] is None
    assert report["machine"]["gemm_gflops"]["float32"] > 0


def _no(*args: object) -> None:
    raise SelfCheckFailed("Self-check failed: prefill, layer 2: relative error 0.5.")


def test_an_unexpected_error_is_one_line(ask: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr("kvweave.engine.build.self_check", broken)
    ran = ask()
    assert (ran.code, ran.out) == (1, "")
    assert "ValueError: first line second line" in ran.complaint
    assert "--log-level debug" in ran.complaint
    ran = ask("--log-level", "debug")
    assert ran.code == 1
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("kvweave: ")


def test_nothing_is_printed_when_no_token_came(ask: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ValueError("no token")

    monkeypatch.setattr("kvweave.engine.engine.Engine.step", broken)
    ran = ask()
    assert (ran.code, ran.out) == (1, "")
    assert "no token" in ran.complaint


def test_an_interrupt_frees_every_slot(ask: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvweave.llm import LLM

    seen: list[LLM] = []
    precompute = LLM.precompute

    def interrupted(self: LLM, *args: Any, **options: Any) -> Any:
        seen.append(self)
        wait, calls = self.loop._next, iter(range(9))

        def stop(pieces: Any) -> Any:
            if next(calls) == 1:
                raise KeyboardInterrupt
            return wait(pieces)

        monkeypatch.setattr(self.loop, "_next", stop)
        return precompute(self, *args, **options)

    monkeypatch.setattr(LLM, "precompute", interrupted)
    ran = ask()
    assert (ran.code, ran.out, ran.complaint) == (1, "", "kvweave: Interrupted.")
    (llm,) = seen
    llm.engine.check_integrity()
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_slots


def test_ctrl_c_while_documents_are_prefilled(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A real signal to a real process: one line, exit code 1, at once, and no file is left anywhere."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**17}))
    (tmp_path / "docs").mkdir()
    for number in range(50):  # some seconds of prefill
        (tmp_path / "docs" / f"{number}.txt").write_text(f"{number} bottles of water on the wall. " * 60)
    before = sorted(tmp_path.rglob("*"))
    command = ["ask", "--docs", tmp_path / "docs", "Who?", "--model", model, "--threads", "1", "--kv-pool", "128MiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvweave", *command, "--log-level", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"KVWEAVE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "tokens computed" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    logged, last = err.splitlines()[:-1], err.splitlines()[-1]
    assert (process.returncode, out, last) == (1, "", "kvweave: Interrupted.")
    assert all(" INFO kvweave: " in line for line in logged)
    assert len(logged) < 40, "it went on after the signal"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", [["models"], ["--help"], ["models", "--json"]])
def test_a_reader_that_goes_away(command: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvweave", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 1


# --- listings ---------------------------------------------------------------------------------------------------------


def test_techniques_are_those_of_the_registry(cli: Callable[..., Ran]) -> None:
    from kvweave.reuse.registry import DEFAULT_TECHNIQUE, techniques

    ran = cli("techniques", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = {item["name"]: item for item in json.loads(ran.out)["techniques"]}
    assert set(TECHNIQUES) == {name for name, cls in techniques().items() if cls.__module__.startswith("kvweave.reuse.")}
    assert sorted(found) == sorted(techniques())
    assert [name for name, item in found.items() if item["default"]] == [DEFAULT_TECHNIQUE]
    assert all(item["reuse"] in ("off", "exact", "fused") and item["summary"] for item in found.values())
    assert {"name": "k", "type": "int", "default": 16} in found["epic"]["options"]
    text = cli("techniques").out
    assert all(name in text for name in found)


def test_models_are_those_of_the_support_table(cli: Callable[..., Ran]) -> None:
    from kvweave.models.support import REFUSED, SUPPORTED

    ran = cli("models", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert [item["model_type"] for item in document["supported"]] == list(SUPPORTED)
    assert {item["model_type"]: item["reason"] for item in document["refused"]} == REFUSED


def test_doctor_with_a_model(cli: Callable[..., Ran], tiny_model_dir: Path) -> None:
    ran = cli("doctor", "--model", tiny_model_dir, "--threads", 1, "--dtype", "float32", "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert report["ok"]
    assert report["model"]["dtype"] == report["machine"]["dtype"] == "float32"
    assert report["model"]["attention"] in ("sdpa", "blocked")
    assert 0 <= report["model"]["self_check"]["prefill_error"] < 2e-4
    assert report["machine"]["threads"] == 1
    assert report["machine"]["memory_gb_per_s"] > 0
    text = cli("doctor", "--model", tiny_model_dir, "--threads", 1)
    assert text.code == 0
    assert "self-check errors" in text.out
