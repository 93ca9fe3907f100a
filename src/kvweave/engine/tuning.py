"""Choices made by measurement: dtype, threads, attention kernel, rows per prefill block.

Every measurement is a few milliseconds of the real shapes, repeated, best of three: the best time is the one least
disturbed by other processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kvweave.attention import AttentionBackend, LayerOptions, ViewRows, make_backend
from kvweave.core.spec import KVLayout
from kvweave.errors import InvalidOption
from kvweave.kv.pool import KVPool, SlotIndex

_ROWS = 1024  # tokens of the measured prefill
_GAIN = 1.1  # a non-default choice must be this much faster: noise must not flip choices from load to load


@dataclass(frozen=True)
class GemmRate:
    """Measured matrix-product rate in GFLOP/s."""

    dtype: torch.dtype
    gflops: float


def gemm_rate(dtype: torch.dtype, device: torch.device, *, rows: int = 512, width: int = 1024) -> GemmRate:
    """Rate of [rows, width] x [width, width]."""
    a = torch.randn(rows, width, device=device).to(dtype)
    w = torch.randn(width, width, device=device).to(dtype)
    seconds = best_of(lambda: linear(a, w), device, repeat=5, inner=4)
    return GemmRate(dtype, 2 * rows * width * width / seconds / 1e9)


def memory_bandwidth(device: torch.device, *, mib: int = 256) -> float:
    """GB/s of reading ``mib`` MiB."""
    data = torch.ones(mib * 2**18, dtype=torch.float32, device=device)
    return data.numel() * 4 / best_of(lambda: data.sum(), device, repeat=3) / 1e9


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidOption(f"device '{name}': this torch sees {torch.cuda.device_count()} CUDA devices. Use device='cpu'.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 on a GPU; on a CPU whichever multiplies faster, float32 unless bfloat16 clearly does."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type != "cpu":
        return torch.bfloat16
    narrow, wide = (gemm_rate(d, device).gflops for d in (torch.bfloat16, torch.float32))
    return torch.bfloat16 if narrow > _GAIN * wide else torch.float32


def pick_threads(threads: int | str, device: torch.device) -> int:
    """Set torch's thread count (one per process) and return it; ``auto`` tries the current count and half of it."""
    if threads != "auto":
        torch.set_num_threads(int(threads))
        return int(threads)
    if device.type == "cpu":
        current = torch.get_num_threads()
        rates: dict[int, float] = {}
        for count in dict.fromkeys((current, max(1, current // 2))):  # never more than torch was told to use
            torch.set_num_threads(count)
            rates[count] = gemm_rate(torch.float32, device).gflops
        best = max(rates, key=lambda n: rates[n])
        torch.set_num_threads(best if rates[best] > _GAIN * rates[current] else current)
    return torch.get_num_threads()


def pick_attention(name: str, layout: KVLayout, device: torch.device) -> AttentionBackend:
    """``auto``: on a GPU the fused kernel; on a CPU whichever runs this model's cold prefill faster."""
    if name != "auto":
        return make_backend(name)
    if device.type != "cpu":
        return make_backend("sdpa")
    times = {n: _attention_seconds(make_backend(n), layout, device) for n in ("sdpa", "blocked")}
    return make_backend(min(times, key=lambda n: times[n]))


def _attention_seconds(backend: AttentionBackend, layout: KVLayout, device: torch.device) -> float:
    spec = layout.layers[layout.first_full_layer % layout.num_layers]
    small = KVLayout((spec,), layout.dtype)
    pool = KVPool(small, _ROWS, device)
    pool.keys[0].normal_()
    pool.values[0].normal_()
    order = torch.arange(_ROWS)
    pool.positions.copy_(order)
    view = ViewRows(0, _ROWS, SlotIndex.of(order, device), order + 1, order)
    prepared = backend.prepare([view], pool)
    queries = torch.randn(spec.num_heads, _ROWS, spec.key_dim, device=device).to(layout.dtype)
    options = LayerOptions(spec.key_dim**-0.5, spec.window)
    return best_of(lambda: backend.run(prepared, 0, queries, pool, options), device)


def pick_prefill_rows(rows: int | str, backend: AttentionBackend, device: torch.device) -> int:
    """Blocks that keep activations in cache on a CPU; the fused causal kernel only takes a prompt in one piece."""
    if rows != "auto":
        return int(rows)
    return 2048 if device.type == "cpu" and backend.name == "blocked" else 8192


def best_of(run: Callable[[], object], device: torch.device, *, repeat: int = 3, inner: int = 1) -> float:
    """Seconds of one ``run``: the best of ``repeat`` timings after a warm-up."""
    run()
    times = []
    for _ in range(repeat):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(inner):
            run()
        synchronise(device)
        times.append((time.perf_counter() - start) / inner)
    return min(times)


def synchronise(device: torch.device) -> None:
    """Wait for the device's queue; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
