"""How the K and V of a token become the bytes of a row, and back.

A row is one token in one layer: K of all heads, then V of all heads, then scales if the codec has them. ``raw`` keeps the
model's own bytes. ``int8`` and ``fp8`` (e4m3) store one byte a number and one fp32 scale per head of K and of V: lossy, so
their name is part of the fingerprint, and what they return is never exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.core.spec import KVLayout
from kvweave.errors import InvalidOption, suggest

CodecName = Literal["raw", "int8", "fp8"]
CODECS: tuple[str, ...] = get_args(CodecName)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SCALE = 4  # bytes

Rows = NDArray[np.uint8]


@dataclass(frozen=True)
class LayerRows:
    """Geometry of the rows of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)

    def row_bytes(self, codec: CodecName, itemsize: int) -> int:
        return self.numbers * itemsize if codec == "raw" else self.numbers + 2 * self.kv_heads * _SCALE


def layer_rows(layout: KVLayout) -> tuple[LayerRows, ...]:
    return tuple(LayerRows(s.num_kv_heads, s.key_dim, s.value_dim) for s in layout.layers)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_codec(name: str) -> CodecName:
    if name not in CODECS:
        raise InvalidOption(f"codec {name!r} is unknown. {suggest(str(name), CODECS)}")
    return name  # type: ignore[return-value]


def pack(keys: Tensor, values: Tensor, codec: CodecName, order: NDArray[np.int64], out: Rows) -> None:
    """Write K and V [kv_heads, n, dim] into ``out`` [n, row_bytes], row i from token ``order[i]``."""
    if codec == "raw":
        places = _as_slice(order)
        for part, data in zip(_split(keys, values, out), (keys, values), strict=True):
            if part.size:
                vectors = _bits(data).view(_vector(data.shape[2], data.element_size()))[..., 0]
                part.view(vectors.dtype)[:] = vectors.T[places]
        return
    (k, k_scale), (v, v_scale) = (_quantise(data, codec) for data in (keys, values))
    numbers = np.concatenate([k.transpose(1, 0, 2).reshape(len(order), -1), v.transpose(1, 0, 2).reshape(len(order), -1)], 1)
    scales = np.concatenate([k_scale.T, v_scale.T], 1).astype("<f4")
    out[:, : numbers.shape[1]] = numbers[order]
    out[:, numbers.shape[1] :] = scales[order].view(np.uint8)


def unpack(
    rows: Rows,
    take: NDArray[np.int64],
    spec: LayerRows,
    codec: CodecName,
    dtype: torch.dtype,
    *,
    copy: bool = True,
) -> tuple[Tensor, Tensor]:
    """K and V [kv_heads, len(take), dim] of the rows ``take`` of ``rows`` [m, row_bytes].

    Without ``copy`` they may be views of ``rows``, where its order and codec allow that.
    """
    heads = spec.kv_heads
    width = heads * spec.key_dim
    if codec == "raw":
        numbers = rows.view(_UNSIGNED[dtype.itemsize])
        parts = (numbers[:, :width], spec.key_dim), (numbers[:, width:], spec.value_dim)
        places = _as_slice(take)
        if not copy and rows.flags.writeable and isinstance(places, slice) and places.step == 1:
            keys, values = (
                torch.from_numpy(p[places]).view(dtype).unflatten(1, (heads, d)).transpose(0, 1) for p, d in parts
            )
        else:
            keys, values = (torch.from_numpy(_gather(part, take, heads, dim)).view(dtype) for part, dim in parts)
        return keys, values
    scales = rows[:, spec.numbers :].view("<f4")
    parts = (rows[:, :width], spec.key_dim), (rows[:, width : spec.numbers], spec.value_dim)
    out = []
    for i, (part, dim) in enumerate(parts):
        codes = _gather(part, take, heads, dim)
        numbers = codes.view(np.int8).astype(np.float32) if codec == "int8" else _FP8[codes]
        scale = scales[:, i * heads : (i + 1) * heads][take].T
        out.append(torch.from_numpy(numbers * scale[:, :, None]).to(dtype))
    return out[0], out[1]


def round_trip(keys: Sequence[Tensor], values: Sequence[Tensor], codec: CodecName) -> tuple[tuple[Tensor, ...], ...]:
    """K and V of all layers as they come back from the codec, so that every tier returns the same numbers."""
    if codec == "raw":
        return tuple(keys), tuple(values)
    back = []
    for k, v in zip(keys, values, strict=True):
        spec = LayerRows(k.shape[0], k.shape[2], v.shape[2])
        order = np.arange(k.shape[1])
        rows = np.empty((k.shape[1], spec.row_bytes(codec, k.element_size())), np.uint8)
        pack(k, v, codec, order, rows)
        back.append(unpack(rows, order, spec, codec, k.dtype))
    return tuple(k for k, _ in back), tuple(v for _, v in back)


_UNSIGNED: dict[int, type[np.unsignedinteger]] = {2: np.uint16, 4: np.uint32}


def _bits(data: Tensor) -> NDArray[np.unsignedinteger]:
    """The numbers as unsigned integers of their size: numpy has no bfloat16."""
    signed = {2: torch.int16, 4: torch.int32}[data.element_size()]
    return data.detach().cpu().contiguous().view(signed).numpy().view(_UNSIGNED[data.element_size()])


def _split(keys: Tensor, values: Tensor, out: Rows) -> tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]]:
    numbers = out.view(_UNSIGNED[keys.element_size()])
    width = keys.shape[0] * keys.shape[2]
    return numbers[:, :width], numbers[:, width:]


def _gather(part: NDArray, take: NDArray[np.int64], heads: int, dim: int) -> NDArray:
    """[rows, heads * dim] -> [heads, len(take), dim]."""
    out = np.empty((heads, len(take), dim), part.dtype)
    if out.size:
        vectors = part.view(_vector(dim, part.itemsize))
        out.view(vectors.dtype)[..., 0] = vectors[_as_slice(take)].T
    return out


def _vector(dim: int, itemsize: int) -> str:
    """The dtype of one head's numbers of one row as one item: copied several times as fast as number by number."""
    return f"V{dim * itemsize}"


def _as_slice(index: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """An index that ascends or descends by one, as a slice: copied as fast as memory allows, where a gather isn't."""
    n = len(index)
    first, last = int(index[0]), int(index[-1])
    step = 1 if last >= first else -1
    if abs(last - first) != n - 1 or not np.array_equal(index, np.arange(first, last + step, step)):
        return index
    stop = last + step
    return slice(first, stop if stop >= 0 else None, step)


def _quantise(data: Tensor, codec: CodecName) -> tuple[Rows, NDArray[np.float32]]:
    """Codes [heads, n, dim] as bytes and scales [heads, n]; a head of zeros gets scale 1.

    A head with an infinity or a NaN gets scale NaN, so that all of it comes back as NaN: a code can't hold either, and
    broken numbers must not turn into plausible ones.
    """
    largest = _LARGEST[codec]
    numbers = data.detach().cpu().float()
    scale = numbers.abs().amax(-1) / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    scale = torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))
    # Scales of the smallest numbers are coarse, so a quotient may exceed what a code can hold.
    scaled = (numbers / scale[..., None]).nan_to_num(0.0).clamp(-largest, largest)
    if codec == "int8":
        return scaled.round().to(torch.int8).numpy().view(np.uint8), scale.numpy()
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scale.numpy()


_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
