"""Which model families run, which are refused and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvweave.errors import UnsupportedModel, suggest


@dataclass(frozen=True)
class Family:
    """A supported ``model_type``; ``notes`` names what makes its attention special."""

    model_type: str
    notes: str


SUPPORTED: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("llama", "grouped queries, RoPE (default, linear, llama3, YaRN)"),
        Family("mistral", "sliding window"),
        Family("mixtral", "mixture of experts"),
        Family("qwen2", "optional sliding window"),
        Family("qwen3", "key norm before rotation"),
        Family("qwen3_moe", "mixture of experts, key norm"),
        Family("gemma2", "softcap, alternating sliding window"),
        Family("gemma3_text", "two RoPE bases, 5:1 sliding window, key norm"),
        Family("phi3", "fused projections, partial rotary (longrope refused)"),
        Family("gpt_oss", "attention sinks, alternating sliding window, YaRN, mixture of experts"),
        Family("glm4", "partial interleaved rotary"),
        Family("granite", "scaled embeddings and attention"),
        Family("olmo2", "key norm over all heads, norm after attention"),
        Family("smollm3", "layers without RoPE"),
        Family("cohere2", "interleaved rotary, sliding window, full layers without RoPE"),
        Family("minimax_m2", "mixture of experts, partial rotary, key norm"),
    )
}

_MLA = "multi-head latent attention: the cache holds latents, of which only a part is rotated"
_RECURRENT = "linear attention or recurrent layers: their state has no per-token entries that could be reused"
_ABSOLUTE = "positions are added to the embeddings: cached KV cannot be moved"
_ALIBI = "ALiBi adds distances to the scores instead of rotating keys"
_MULTIMODAL = "multimodal inputs and M-RoPE are not handled; use the text-only model of the family"

REFUSED: dict[str, str] = {
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "glm4_moe_lite": _MLA,
    "kimi_k2": _MLA,
    "minimax": _RECURRENT,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "falcon_h1": _RECURRENT,
    "jamba": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "lfm2": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "rwkv": _RECURRENT,
    "gpt2": _ABSOLUTE,
    "opt": _ABSOLUTE,
    "gpt_neo": _ABSOLUTE,
    "mpt": _ALIBI,
    "bloom": _ALIBI,
    "gemma3": _MULTIMODAL,
    "gemma3n": _MULTIMODAL,
    "qwen2_vl": _MULTIMODAL,
    "qwen2_5_vl": _MULTIMODAL,
    "llava": _MULTIMODAL,
    "mllama": _MULTIMODAL,
    "llama4": _MULTIMODAL,
}

_FROZEN_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}


def check_supported(config: Any) -> None:
    """Raise ``UnsupportedModel`` with the reason unless this model configuration can be served."""
    kind = config.model_type
    if kind in REFUSED:
        raise UnsupportedModel(f"Models of type '{kind}' are refused: {REFUSED[kind]}. See: kvweave models")
    if kind not in SUPPORTED:
        raise UnsupportedModel(f"Models of type '{kind}' have not been verified. {suggest(kind, SUPPORTED)}")
    for rope_type in _rope_types(config):
        if rope_type not in _FROZEN_ROPE:
            raise UnsupportedModel(
                f"RoPE type '{rope_type}' is refused: its frequencies depend on the longest position in a batch, so "
                "cached keys would not fit later prompts. Remove the scaling from config.json to use the base context."
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("Bidirectional attention is refused: cached KV would depend on later text.")


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, dict)]
    return {str(p.get("rope_type", "default")) for p in (nested or [parameters])}
