"""Evidence that a loaded model behaves under our attention as under its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvweave.errors import SelfCheckFailed
from kvweave.models.adapter import DecoderAdapter

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest relative error |a - b| / |b| of a layer's output; a wrong mask or rotation is off by more than 0.1."""


@contextmanager
def recorded_layers(adapter: DecoderAdapter) -> Iterator[list[Tensor]]:
    """Collect the output [rows, hidden] of every decoder layer while the model runs."""
    outputs: list[Tensor] = []

    def hook(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.append(hidden[0].detach().float().cpu())

    handles = [layer.register_forward_hook(hook) for layer in adapter.layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def native_layers(adapter: DecoderAdapter, token_ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Layer outputs and logits [n, vocabulary] of the model's own eager forward over ``token_ids`` [n]."""
    with recorded_layers(adapter) as outputs, adapter.native() as model:
        logits = model(input_ids=token_ids[None].to(adapter.device), use_cache=False).logits[0]
    return outputs, logits.float().cpu()


def compare(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype, what: str, unit: str = "layer") -> float:
    """Largest relative error over layers; raises ``SelfCheckFailed`` naming the first layer above the tolerance."""
    worst = 0.0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        error = float((a - b).norm() / b.norm().clamp_min(1e-12))
        if not error <= TOLERANCE[dtype]:  # also catches NaN
            raise SelfCheckFailed(
                f"Self-check failed: {what}, {unit} {index}: relative error {error:.1e}, limit {TOLERANCE[dtype]:.0e}. "
                "This model is not served. Please report its config.json."
            )
        worst = max(worst, error)
    return worst
