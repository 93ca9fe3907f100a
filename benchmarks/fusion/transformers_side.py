"""transformers' own sdpa prefill and decode on the same ids."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor


class Native:
    """A second copy of the model, untouched, with a cache as ``generate`` would use it."""

    def __init__(self, directory: Path, dtype: torch.dtype, token_ids: Tensor) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").eval()
        self.ids = token_ids[None]

    @torch.inference_mode()
    def prefill(self) -> Any:
        """Logits of the last token only, as ``generate`` computes them; returns the KV cache."""
        out = self.model(input_ids=self.ids, use_cache=True, logits_to_keep=1)
        cache = getattr(out, "cache", None)  # named past_key_values before transformers 5.24
        return cache if cache is not None else out.past_key_values

    @torch.inference_mode()
    def decode_ms(self, tokens: int) -> float:
        """Median milliseconds a token behind the whole prompt."""
        cache = self.prefill()
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        token, times = self.ids[:, :1], []
        for _ in range(tokens + 1):
            start = time.perf_counter()
            self.model(input_ids=token, use_cache=True, **{name: cache})
            times.append(time.perf_counter() - start)
        return 1e3 * median(times[1:])
