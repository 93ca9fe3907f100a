"""Checking a Hugging Face model directory before anything is loaded, and hashing what decides its output.

Both look at files only: no torch and no transformers, so a broken directory is reported at once, with the
file to blame.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvweave.errors import BrokenModel

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# One of these sets of files must be there for a tokenizer to load.
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",), ("tekken.json",))
# All that can change the token ids of a text; the chat template can't (it changes the text).
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors format itself


def check_directory(directory: Path) -> None:
    """Raise :class:`BrokenModel` unless ``directory`` holds a config, whole safetensors weights and a tokenizer.

    Reads the JSON files and the headers of the weight files, never the weights.
    """
    if not directory.is_dir():
        raise BrokenModel(f"'{directory}' is not a directory.")
    _read_json(directory / CONFIG)
    for file, tensors in _expected(directory).items():
        header = _check_safetensors(file)
        absent = sorted(tensors - header.keys())
        if absent:
            raise BrokenModel(f"'{file}' lacks the tensor '{absent[0]}' that {INDEX} promises. Fetch the model again.")
    if not any(all((directory / name).is_file() for name in names) for names in TOKENIZERS):
        raise BrokenModel(f"'{directory}' has no tokenizer (tokenizer.json). Fetch the tokenizer files of the model too.")


def weights_digest(directory: Path) -> str:
    """blake3 (hex, 64 characters) of the content of the weights, ``config.json`` and the tokenizer files.

    The same files give the same digest wherever they lie; every byte counts. Raises :class:`BrokenModel` if the weights
    are missing or a file can't be read.
    """
    from blake3 import blake3

    files = [directory / CONFIG, *weight_files(directory)]
    files += [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    total = blake3()
    for file in sorted(files, key=lambda file: file.name):
        # A digest per file and not one stream: moving bytes from the end of one file to the start of the next differs.
        total.update(f"{file.name}\0{file_digest(file)}\n".encode())
    return total.hexdigest()


def file_digest(file: Path) -> str:
    """blake3 (hex) of the content of ``file``, on all cores; raises :class:`BrokenModel` if it can't be read."""
    from blake3 import blake3

    try:
        if file.stat().st_size == 0:
            return blake3().hexdigest()  # an empty file can't be mapped
        return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()
    except OSError as error:
        raise BrokenModel(f"Cannot read '{file}': {error.strerror or error}.") from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the model, in the order of their names."""
    return sorted(_expected(directory))


def _expected(directory: Path) -> dict[Path, set[str]]:
    """Weight file -> the tensors that the index promises in it (none are promised without an index)."""
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: set()}
    if not (directory / INDEX).is_file():
        raise BrokenModel(_no_weights(directory))
    weight_map = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise BrokenModel(f"'{directory / INDEX}' has no weight_map. Fetch the model again.")
    expected: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise BrokenModel(f"'{directory / INDEX}' names {name!r}, which is not a file of this directory.")
        expected.setdefault(directory / name, set()).add(tensor)
    missing = [file.name for file in sorted(expected) if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BrokenModel(f"'{directory}' lacks the weight file {missing[0]}{more}. Fetch the model again.")
    return expected


def _no_weights(directory: Path) -> str:
    pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
    if pickles:
        return (
            f"'{directory}' has only pickle weights ({pickles[0]}), which can run code when they are loaded. "
            "kvweave reads safetensors only: save the model again with save_pretrained."
        )
    others = sorted(file.name for file in directory.glob("*.safetensors"))
    if others:
        return f"'{directory}' has {others[0]} but neither {SINGLE} nor {INDEX}, so the model is not complete."
    return f"'{directory}' has no weights: {SINGLE} or {INDEX} is needed."


def _check_safetensors(file: Path) -> dict[str, Any]:
    """The header of a safetensors file, after checking that the file is as long as the header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":  # a pointer file of Git LFS is text that starts like this
                raise BrokenModel(f"'{file}' is a Git LFS pointer, not the weights. Run: git lfs pull")
            if len(start) < 8 or length > min(HEADER_LIMIT, size - 8):
                raise BrokenModel(f"'{file}' is truncated or not a safetensors file. Fetch the model again.")
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        needed = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except OSError as error:
        raise BrokenModel(f"Cannot read '{file}': {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise BrokenModel(f"'{file}' has a damaged safetensors header. Fetch the model again.") from error
    if size != needed:
        raise BrokenModel(f"'{file}' should have {needed} bytes but has {size}. Fetch the model again.")
    return entries


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise BrokenModel(f"'{os.fspath(file.parent)}' has no {file.name}, so it is not a Hugging Face model.") from error
    except OSError as error:
        raise BrokenModel(f"Cannot read '{file}': {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"'{file}' is not valid JSON. Fetch the model again.") from error
    if not isinstance(content, dict):
        raise BrokenModel(f"'{file}' is not a JSON object. Fetch the model again.")
    return content
