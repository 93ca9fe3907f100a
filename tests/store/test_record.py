"""The record format: exact where it says so, and sure to notice every byte that isn't what was written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.core.keys import ChunkIdentity, ChunkKey, ModelFingerprint, Scope, chunk_key
from kvweave.store import record as fmt
from kvweave.store.base import DAMAGED, ChunkRecord, TierError
from kvweave.store.codec import CodecName, check_codec, pack, round_trip, unpack
from kvweave.store.ranking import Ranking, TextOrder

FINGERPRINT = ModelFingerprint.of(weights="w", tokenizer="t", dtype="bfloat16")
SCOPE = Scope.of("tenant")
SHAPES = ((2, 8, 8), (1, 16, 4), (3, 2, 6))
"""(kv_heads, key_dim, value_dim) by layer."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bits(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.uint8)


def make(
    n: int, dtype: torch.dtype = torch.bfloat16, shapes: tuple[tuple[int, int, int], ...] = SHAPES, anchor: int = 3
) -> ChunkRecord:
    noise = torch.Generator().manual_seed(n)
    keys = tuple(torch.randn(heads, n, dim, generator=noise).to(dtype) for heads, dim, _ in shapes)
    values = tuple(torch.randn(heads, n, dim, generator=noise).to(dtype) for heads, _, dim in shapes)
    identity = ChunkIdentity.of(range(100, 100 + n), range(anchor), FINGERPRINT, SCOPE)
    return ChunkRecord(identity, keys, values, prefill_ms=12.5)


def read(data: memoryview, expected: ChunkKey | None = None) -> tuple[fmt.Header, list[Tensor], list[Tensor]]:
    """All of a record in the order of its tokens, every row checked."""
    header = fmt.decode_header(data, len(data), expected)
    n, back = header.num_tokens, np.argsort(header.perm)
    keys, values = [], []
    for layer, spec in enumerate(header.layers):
        width = header.row_bytes(layer)
        rows = np.frombuffer(data, np.uint8, n * width, header.offsets[layer]).reshape(n, width)
        fmt.check_rows(header, layer, 0, rows)
        k, v = unpack(rows, back, spec, header.codec, header.dtype)
        keys.append(k)
        values.append(v)
    return header, keys, values


# Keys


def golden() -> tuple[str, str, str]:
    scope = Scope.of("tenant", epoch=2, secret=b"shared")
    fingerprint = ModelFingerprint.of(weights="0123", rope="theta=10000", dtype="bfloat16")
    return scope.tag.hex(), scope.key.hex(), chunk_key([1, 2, 70000], [0, 5], fingerprint, scope).name


GOLDEN = (
    "afbb2b832bf0b844",
    "ab781361da498280afa546f5545ea18022ef0afae41e8919bd2d2948541932e5",
    "9070a6d9a1aa0cdd/afbb2b832bf0b844/45/4512c178c0ddb537420a3ad150115a46",
)


def test_keys_are_what_they_always_were() -> None:
    """A change here makes every stored record unreachable."""
    assert golden() == GOLDEN


@pytest.mark.parametrize("seed", ["0", "1234"])
def test_keys_do_not_depend_on_the_process(seed: str) -> None:
    code = "from tests.store.test_record import golden; print(*golden())"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert tuple(printed.stdout.split()) == GOLDEN


def test_every_part_decides_the_key() -> None:
    base = chunk_key([1, 2], [3], FINGERPRINT, SCOPE)
    others = [
        chunk_key([1, 2, 3], [], FINGERPRINT, SCOPE),
        chunk_key([2], [3, 1], FINGERPRINT, SCOPE),
        chunk_key([1], [3], FINGERPRINT, SCOPE),
        chunk_key([2, 1], [3], FINGERPRINT, SCOPE),
        chunk_key([1, 2], [4], FINGERPRINT, SCOPE),
        chunk_key([1, 2], [3], ModelFingerprint.of(weights="x"), SCOPE),
        chunk_key([1, 2], [3], FINGERPRINT, Scope.of("tenant", epoch=1)),
        chunk_key([1, 2], [3], FINGERPRINT, Scope.of("tenant", secret=b"s")),
        chunk_key([1, 2], [3], FINGERPRINT, Scope.of("other")),
    ]
    assert len({base.content, *(k.content for k in others)}) == len(others) + 1
    assert Scope.of("tenant", epoch=1).tag == SCOPE.tag


# Round trips


class Reversed:
    name = "reversed/1"

    def order(self, record: ChunkRecord) -> np.ndarray:
        return np.arange(len(record.identity.token_ids))[::-1]


@pytest.mark.parametrize("ranking", [TextOrder(), Reversed()], ids=["text", "reversed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", ["raw", "int8", "fp8"])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 77])
def test_round_trip(n: int, codec: CodecName, dtype: torch.dtype, ranking: Ranking) -> None:
    record = make(n, dtype)
    data = fmt.encode(record, ranking, codec, "test")
    header, keys, values = read(data, record.key)
    fmt.check_identity(header, record.identity)
    want_keys, want_values = round_trip(record.keys, record.values, codec)
    for got, want in zip([*keys, *values], [*want_keys, *want_values], strict=True):
        assert got.dtype == dtype
        assert torch.equal(bits(got), bits(want))
    assert header.identity == record.identity
    assert (header.order, header.codec, header.dtype, header.writer) == (ranking.name, codec, dtype, "test")
    assert (header.prefill_ms, header.group, header.total) == (12.5, fmt.GROUP, len(data))
    assert all(offset % fmt.PAGE == 0 for offset in header.offsets)
    assert fmt.header_length(data[: fmt.FIRST_READ], len(data)) <= header.offsets[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_keeps_every_bit(dtype: torch.dtype) -> None:
    """Also of infinities, of signed zeros, and the payload of NaNs."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    wide = patterns.view(dtype) if dtype.itemsize == 2 else (patterns.to(torch.int32) << 16 | 0x1234).view(dtype)
    data = wide.reshape(4, 64, 256)
    record = replace(make(64), keys=(data,), values=(data.flip(0),))
    _, keys, values = read(fmt.encode(record, Reversed(), "raw", "test"))
    assert torch.equal(bits(keys[0]), bits(data))
    assert torch.equal(bits(values[0]), bits(data.flip(0)))


def test_tensors_that_are_views() -> None:
    record = make(33)
    keys = tuple(torch.stack([k, k * 2], -1)[..., 0] for k in record.keys)
    assert not keys[0].is_contiguous()
    _, got, _ = read(fmt.encode(replace(record, keys=keys), TextOrder(), "raw", "test"))
    assert all(torch.equal(a, b) for a, b in zip(got, record.keys, strict=True))


def test_the_first_rows_can_be_read_and_checked_alone() -> None:
    record = make(77)
    data = fmt.encode(record, Reversed(), "raw", "test")
    header = fmt.decode_header(data, len(data))
    width = header.row_bytes(1)
    for groups in (1, 2):
        rows = np.frombuffer(data, np.uint8, groups * 32 * width, header.offsets[1]).reshape(-1, width)
        fmt.check_rows(header, 1, 0, rows)
        keys, _ = unpack(rows, np.arange(32), header.layers[1], "raw", header.dtype)
        assert torch.equal(keys, record.keys[1][:, header.perm[:32]])
        fmt.check_rows(header, 1, 32, rows[32:])


def test_a_ranking_must_be_a_permutation() -> None:
    class Twice:
        name = "twice/1"

        def order(self, record: ChunkRecord) -> np.ndarray:
            return np.zeros(len(record.identity.token_ids), np.int64)

    with pytest.raises(ValueError, match="every token of the chunk once"):
        fmt.encode(make(3), Twice(), "raw", "test")


# Codecs


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-6, 1.0, 1e4, 1e30]))
@settings(max_examples=60, deadline=None)
def test_errors_of_lossy_codecs_are_bounded(seed: int, size: float) -> None:
    noise = torch.Generator().manual_seed(seed)
    data = torch.randn(2, 9, 16, generator=noise) ** 3 * size
    largest = data.abs().amax(-1, keepdim=True)
    for codec in ("int8", "fp8"):
        (back,), _ = round_trip((data,), (data,), codec)
        error = (back - data).abs()
        # int8: half a step. fp8: half of its last of 3 mantissa bits, or half of its smallest step.
        bound = largest / 254 if codec == "int8" else torch.maximum(data.abs() / 16, largest / 448 / 1024)
        assert bool((error <= bound * 1.001).all())


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_the_smallest_numbers(codec: CodecName, dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, 3, 4, dtype=dtype)
    (back,), _ = round_trip((zeros,), (zeros,), codec)
    assert torch.equal(back, zeros)
    tiny = torch.finfo(dtype).smallest_normal
    for scale in (1.0, 2**-3, 2**-6, 2**-10, *(k * 2.0**-23 for k in range(300, 1000, 7))):
        data = torch.full((1, 1, 4), tiny * scale).to(dtype)
        (back,), _ = round_trip((data,), (data,), codec)
        assert bool(((back - data).abs() <= data.abs()).all()), (scale, back, data)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_with_a_number_that_is_none_becomes_none(codec: CodecName, bad: float, dtype: torch.dtype) -> None:
    """Visibly broken numbers never turn into plausible ones, and rows and heads beside them are untouched."""
    data = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    (clean,), _ = round_trip((data,), (data,), codec)
    data[1, 2, 5] = bad
    (back,), _ = round_trip((data,), (data,), codec)
    assert bool(back[1, 2].isnan().all())
    back[1, 2] = clean[1, 2]
    assert torch.equal(back, clean)


def test_an_unknown_codec() -> None:
    from kvweave.errors import InvalidOption

    assert check_codec("fp8") == "fp8"
    with pytest.raises(InvalidOption, match="Did you mean 'int8'"):
        check_codec("int88")


def test_packing_keeps_the_order_of_rows() -> None:
    k, v = torch.arange(12.0).reshape(2, 3, 2), torch.arange(6.0).reshape(2, 3, 1)
    out = np.empty((3, 6 * 4), np.uint8)
    pack(k, v, "raw", np.array([2, 0, 1]), out)
    assert out.view("<f4")[0].tolist() == [4, 5, 10, 11, 2, 5]


# Damage


def small() -> tuple[ChunkRecord, bytes]:
    record = make(5, shapes=((1, 2, 2), (1, 4, 2)), anchor=2)
    return record, bytes(fmt.encode(record, Reversed(), "raw", "test"))


def test_every_flipped_byte_is_found_or_lies_in_padding() -> None:
    record, data = small()
    header, keys, values = read(memoryview(data), record.key)
    used = [range(fmt.header_length(memoryview(data), len(data)))]
    used += [range(at, at + 5 * header.row_bytes(layer)) for layer, at in enumerate(header.offsets)]
    meaningful = {i for part in used for i in part}
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 + at % 255
        if at in meaningful:
            with pytest.raises(TierError) as error:
                read(memoryview(flipped), record.key)
            assert error.value.reason in DAMAGED | {"version"}
        else:
            _, k, v = read(memoryview(flipped), record.key)
            assert all(torch.equal(a, b) for a, b in zip([*k, *v], [*keys, *values], strict=True))


def test_every_flipped_bit_of_the_prologue_is_found() -> None:
    record, data = small()
    for bit in range(64 * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TierError):
            read(memoryview(flipped), record.key)


def test_every_truncation_is_found() -> None:
    record, data = small()
    for length in range(len(data)):
        with pytest.raises(TierError) as error:
            fmt.decode_header(memoryview(data)[:length], length, record.key)
        assert error.value.reason == "short"
    header_length = fmt.header_length(memoryview(data), len(data))
    for length in range(header_length):  # the value is whole, what was read of it isn't
        with pytest.raises(TierError, match="short"):
            fmt.decode_header(memoryview(data)[:length], len(data), record.key)
    assert fmt.decode_header(memoryview(data)[:header_length], len(data), record.key).num_tokens == 5
    with pytest.raises(TierError, match="short"):
        fmt.decode_header(memoryview(data + b"x"), len(data) + 1, record.key)


def test_another_record_under_this_name() -> None:
    record, data = small()
    header = fmt.decode_header(memoryview(data), len(data), record.key)
    for other in (
        replace(record.key, content=bytes(16)),
        replace(record.key, scope=bytes(8)),
        replace(record.key, model=bytes(8)),
    ):
        with pytest.raises(TierError, match="key"):
            fmt.decode_header(memoryview(data), len(data), other)
    identity = record.identity
    changes: list[tuple[str, ChunkIdentity]] = [
        ("fingerprint", replace(identity, fingerprint=ModelFingerprint.of(weights="x"))),
        ("tokens", replace(identity, token_ids=(*identity.token_ids[:-1], 7))),
        ("tokens", replace(identity, anchor_ids=(9, 9))),
        ("tokens", replace(identity, anchor_ids=())),
    ]
    for reason, wanted in changes:
        with pytest.raises(TierError) as error:
            fmt.check_identity(header, wanted)
        assert error.value.reason == reason


def test_another_version() -> None:
    record, data = small()
    for at, value in ((7, 2), (8, 2)):
        changed = bytearray(data)
        changed[at] = value
        with pytest.raises(TierError) as error:
            fmt.decode_header(memoryview(changed), len(changed), record.key)
        assert error.value.reason == "version"


# Headers that were made to harm: their digests are right


def forge(text: bytes, tables: bytes, total: int | None = None) -> bytes:
    length = 64 + len(text) + len(tables)
    size = total if total is not None else -(-length // 4096) * 4096 + 8192
    fixed = (fmt.MAGIC, fmt.VERSION, length, len(text), 0, size, bytes(16))
    digest = blake3(fmt._PROLOGUE.pack(*fixed, bytes(16)) + text + tables).digest(length=16)
    return fmt._PROLOGUE.pack(*fixed, digest) + text + tables


def refused(data: bytes, size: int) -> None:
    """Parsed, or refused as damaged; nothing else."""
    try:
        header = fmt.decode_header(memoryview(data), size)
    except TierError as error:
        assert error.reason in DAMAGED  # noqa: PT017
        return
    assert header.num_tokens >= 1
    # What readers rely on.
    sections = [header.num_tokens * header.row_bytes(layer) for layer in range(len(header.layers))]
    assert all(at > 0 and at + length <= size for at, length in zip(header.offsets, sections, strict=True))


def small_text() -> dict[str, object]:
    _, data = small()
    fields = fmt._PROLOGUE.unpack(data[:64])
    return json.loads(data[64 : 64 + fields[3]])


def small_tables() -> bytes:
    _, data = small()
    fields = fmt._PROLOGUE.unpack(data[:64])
    return data[64 + fields[3] : fields[2]]


def test_a_forged_header_that_is_right_is_taken() -> None:
    _, data = small()
    assert fmt.decode_header(memoryview(forge(json.dumps(small_text()).encode(), small_tables(), len(data))), len(data))


NASTY: list[object] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    2**64,
    10**400,
    1.5,
    1e308,
    "",
    "x",
    "1",
    [],
    [[]],
    [[1, 2]],
    {},
    {"a": 1},
]
NASTY += [
    [[1, 2, 2]] * 3,
    [[2**62, 1, 1], [2**62, 1, 1]],
    [[-1, -2, -3], [1, 4, 2]],
    [[1, 0, 0], [1, 4, 2]],
    float("nan"),
    float("inf"),
]


@pytest.mark.parametrize("field", sorted(small_text()))
def test_nonsense_in_any_field(field: str) -> None:
    _, data = small()
    without = {name: value for name, value in small_text().items() if name != field}
    for about in (without, *({**without, field: nasty} for nasty in NASTY)):
        refused(forge(json.dumps(about).encode(), small_tables(), len(data)), len(data))


@pytest.mark.parametrize(("layers", "heads"), [(8, 2**60), (32, 2**58), (2, 2**62), (2, 2**70)])
def test_sizes_that_wrap_around_are_refused(layers: int, heads: int) -> None:
    """The sections' lengths, 10 bytes a head, add up to nothing in 64 bits."""
    text = json.dumps({**small_text(), "layers": [[heads, 1, 0]] * layers}).encode()
    tables = small_tables()[: 4 * (5 + 2 + 5)] + bytes(16 * layers)
    with pytest.raises(TierError, match="layout"):
        fmt.decode_header(memoryview(forge(text, tables, 4096)), 4096)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"tokens":' + b"9" * 5000 + b"}", b"1" * 5000]
)
def test_text_that_is_no_header(text: bytes) -> None:
    with pytest.raises(TierError):
        fmt.decode_header(memoryview(forge(text, b"")), 64 * 2**20)
    data = forge(text, b"")
    with pytest.raises(TierError, match="layout"):
        fmt.decode_header(memoryview(data), fmt._PROLOGUE.unpack(data[:64])[5])


def test_text_that_would_fill_memory() -> None:
    text = b"[" + b"[]," * 400_000 + b"[]]"
    data = forge(text, b"")
    with pytest.raises(TierError, match="header length"):
        fmt.decode_header(memoryview(data), fmt._PROLOGUE.unpack(data[:64])[5])


@pytest.mark.parametrize(
    ("field", "value"), [("scope", "00"), ("scope", ""), ("prefill_ms", float("nan")), ("created", 1e999)]
)
def test_values_that_no_writer_writes(field: str, value: object) -> None:
    size = len(small()[1])
    with pytest.raises(TierError, match="scope or times"):
        fmt.decode_header(memoryview(forge(json.dumps({**small_text(), field: value}).encode(), small_tables(), size)), size)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(small_text())), JSON, max_size=4), st.binary(max_size=8), st.integers(0, 200))
@settings(max_examples=300, deadline=None)
def test_fuzzed_fields(changes: dict[str, object], tail: bytes, cut: int) -> None:
    _, data = small()
    tables = small_tables()
    tables = tables[: len(tables) - min(cut, len(tables)) if tail else len(tables)] + tail
    refused(forge(json.dumps({**small_text(), **changes}).encode(), tables, len(data)), len(data))


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.booleans())
@settings(max_examples=300, deadline=None)
def test_fuzzed_bytes(noise: bytes, size: int, own: bool) -> None:
    data = noise if own else fmt._PROLOGUE.pack(fmt.MAGIC, 1, len(noise), size % 400, 0, size, bytes(16), bytes(16)) + noise
    refused(data, size)
    with pytest.raises(TierError):
        fmt.decode_header(memoryview(data), size)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_fuzzed_tables(data: st.DataObject) -> None:
    tables = bytearray(small_tables())
    for _ in range(data.draw(st.integers(1, 6))):
        tables[data.draw(st.integers(0, len(tables) - 1))] = data.draw(st.integers(0, 255))
    size = len(small()[1])
    refused(forge(json.dumps(small_text()).encode(), bytes(tables), size), size)
