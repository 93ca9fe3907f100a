"""Reading a GGUF file: typed metadata and dequantised tensors, with our errors instead of the reader's."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.errors import BrokenModel, UnsupportedModel

if TYPE_CHECKING:
    import numpy as np
    import torch

MAGIC = b"GGUF"
CHUNK = 1 << 23  # values dequantised at once: 32 MiB as float32, so that a large embedding doesn't need three copies
_MISSING = object()


class GgufFile:
    """An open GGUF file. The tensors stay in the memory map until they are asked for.

    Raises :class:`BrokenModel` if the file is truncated or is no GGUF file.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            with path.open("rb") as stream:
                if stream.read(4) != MAGIC:
                    raise BrokenModel(f"'{path.name}' is not a GGUF file (it doesn't start with 'GGUF').")
            self._reader = GGUFReader(path)
        except OSError as error:
            raise BrokenModel(f"Cannot read '{path}': {error.strerror or error}.") from error
        except (ValueError, KeyError, IndexError, TypeError, struct.error, OverflowError, MemoryError) as error:
            raise BrokenModel(f"'{path.name}' is truncated or damaged. Fetch the file again.") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.get("general.architecture"))
        if self._reader.byte_order != "I":
            raise UnsupportedModel(f"'{path.name}' was written for the other byte order.")
        if int(self.get("split.count", 1)) > 1:
            raise UnsupportedModel(f"'{path.name}' is one part of several. Join them first: llama-gguf-split --merge")

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of ``key`` as plain Python; :class:`BrokenModel` if it is missing and no ``default`` is given."""
        field = self._reader.fields.get(key)
        if field is None:
            if default is _MISSING:
                raise BrokenModel(f"'{self.path.name}' doesn't state '{key}', so the model can't be rebuilt from it.")
            return default
        value = field.contents()
        return value.item() if hasattr(value, "item") else value

    def own(self, key: str, default: Any = _MISSING) -> Any:
        """``get`` for a key of the file's architecture: ``own("block_count")`` reads ``llama.block_count``."""
        return self.get(f"{self.architecture}.{key}", default)

    def own_keys(self) -> set[str]:
        """All keys of the file's architecture, without its name in front."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix) for key in self._reader.fields if key.startswith(prefix)}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in torch's order (a GGUF file lists the fastest dimension first)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def values(self, name: str, offset: float = 0.0) -> torch.Tensor:
        """Tensor ``name`` as bfloat16, after adding ``offset`` in float32. Shape: :meth:`shape`."""
        import torch

        shape = self.shape(name)
        out = torch.empty(shape, dtype=torch.bfloat16)
        rows = out.view(-1, shape[-1])
        start = 0
        for block in self._blocks(name):
            rows[start : start + len(block)] = torch.from_numpy(block).add_(offset)
            start += len(block)
        return out

    def sample(self, name: str, count: int) -> torch.Tensor:
        """About ``count`` rows of a matrix, evenly spaced, as float32 [n, columns]."""
        import torch

        data = self.tensors[name].data
        return torch.from_numpy(self._dequantise(name, data[:: max(1, len(data) // count)]))

    def _blocks(self, name: str) -> Iterator[np.ndarray]:
        """float32 blocks of whole rows [n, columns], in order."""
        data = self.tensors[name].data
        data = data.reshape(-1, data.shape[-1])
        step = max(1, CHUNK // self.shape(name)[-1])
        for start in range(0, len(data), step):
            yield self._dequantise(name, data[start : start + step])

    def _dequantise(self, name: str, rows: np.ndarray) -> np.ndarray:
        import numpy as np
        from gguf.quants import dequantize

        kind = self.tensors[name].tensor_type
        try:
            values = dequantize(rows, kind)
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedModel(
                f"'{self.path.name}' stores '{name}' as {kind.name}, which can't be dequantised."
            ) from error
        return np.array(values, dtype=np.float32)  # a copy: the memory map is read-only
