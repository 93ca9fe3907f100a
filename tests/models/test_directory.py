"""Checks of a model directory and the digest of its content; no model is loaded here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvweave.errors import BrokenModel
from kvweave.models.sources import check_directory, weights_digest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The smallest directory that passes: one weight file."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(directory: Path) -> Path:
    (directory / "model.safetensors").unlink()
    for number in (1, 2):
        save_file({f"w{number}": torch.full((4,), float(number))}, directory / f"model-{number}.safetensors")
    write_index(directory, {"w1": "model-1.safetensors", "w2": "model-2.safetensors"})
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def broken(directory: Path, *words: str) -> None:
    with pytest.raises(BrokenModel) as caught:
        check_directory(directory)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_whole_directories_pass(directory: Path) -> None:
    check_directory(directory)


def test_whole_sharded_directory_passes(sharded: Path) -> None:
    check_directory(sharded)


@pytest.mark.parametrize("names", [["tokenizer.model"], ["vocab.json", "merges.txt"], ["vocab.txt"]])
def test_other_tokenizer_files_pass(directory: Path, names: list[str]) -> None:
    (directory / "tokenizer.json").unlink()
    broken(directory, "tokenizer")
    for name in names:
        (directory / name).write_text("x")
    check_directory(directory)


def test_no_directory(tmp_path: Path) -> None:
    broken(tmp_path / "nowhere", "nowhere", "not a directory")


def test_config_missing(directory: Path) -> None:
    (directory / "config.json").unlink()
    broken(directory, "config.json")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_config_invalid(directory: Path, content: bytes) -> None:
    (directory / "config.json").write_bytes(content)
    broken(directory, "config.json", "JSON")


def test_only_pickle_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    broken(directory, "pytorch_model.bin", "pickle", "safetensors only")


def test_no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    broken(directory, "no weights")


def test_weights_without_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    broken(sharded, "model-1.safetensors", "not complete")


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / "model-1.safetensors").unlink()
    (sharded / "model-2.safetensors").unlink()
    broken(sharded, "model-1.safetensors and 1 more")


def test_index_and_shard_disagree(sharded: Path) -> None:
    write_index(sharded, {"w1": "model-1.safetensors", "w2": "model-1.safetensors"})
    broken(sharded, "'w2'")


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, {"a": "../model.safetensors"}, {"a": ""}])
def test_index_makes_no_sense(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    broken(sharded, "index.json")


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_truncated_weights(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    broken(directory, "model.safetensors", "Fetch the model again")


def test_appended_bytes(directory: Path) -> None:
    with (directory / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    broken(directory, "should have")


@pytest.mark.parametrize(
    "header", [b"[]", b"not json", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b'{"a": {"data_offsets": ["x", "y"]}}']
)
def test_damaged_header(directory: Path, header: bytes) -> None:
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    broken(directory, "damaged safetensors header")


def test_lfs_pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    broken(directory, "git lfs pull")


def test_digest_is_of_the_content(directory: Path, tmp_path: Path) -> None:
    before = weights_digest(directory)
    assert len(before) == 64
    assert weights_digest(directory.rename(tmp_path / "elsewhere")) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"])
def test_digest_sees_every_file(directory: Path, name: str) -> None:
    before = weights_digest(directory)
    (directory / name).write_text('{"other": 1}')
    assert weights_digest(directory) != before


def test_digest_ignores_what_does_not_change_kv(directory: Path) -> None:
    before = weights_digest(directory)
    (directory / "README.md").write_text("hello")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    assert weights_digest(directory) == before


def test_digest_sees_one_bit(sharded: Path) -> None:
    before = weights_digest(sharded)
    file = sharded / "model-2.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    check_directory(sharded)
    assert weights_digest(sharded) != before


def test_digest_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(BrokenModel, match="no weights"):
        weights_digest(directory)


def test_digest_of_empty_file(directory: Path) -> None:
    (directory / "merges.txt").touch()
    assert len(weights_digest(directory)) == 64
