"""What the hardware allows: the time of the necessary arithmetic at the measured GEMM rate, or of the necessary reads."""

from __future__ import annotations

from kvweave.models.adapter import DecoderAdapter


def prefill_limit(adapter: DecoderAdapter, tokens: int, gflops: float) -> float:
    """Seconds of a full prefill if every product ran at ``gflops``: linear layers, causal attention, one LM head row."""
    linear = sum(p.numel() for layer in adapter.layers for p in layer.parameters() if p.dim() == 2)
    attention = sum(s.num_heads * (s.key_dim + s.value_dim) for s in adapter.layout.layers)
    flops = 2 * linear * tokens + attention * tokens * (tokens + 1)  # 2 flops x half of the square
    flops += 2 * adapter.vocab_size * adapter.config.hidden_size
    return flops / (gflops * 1e9)


def decode_limit(adapter: DecoderAdapter, context: int, gb_per_s: float) -> float:
    """Seconds of one decoded token if weights and KV were read once at ``gb_per_s``."""
    weights = sum(p.numel() * p.element_size() for p in adapter.model.parameters())
    return (weights + context * adapter.layout.bytes_per_token) / (gb_per_s * 1e9)
