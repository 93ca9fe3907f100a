"""The test matrix: tiny random models of every supported family."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from kvweave.models.adapter import DecoderAdapter

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-yarn": {"rope_parameters": YARN},
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi3": {"partial_rotary_factor": 0.5},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "glm4": {"head_dim": 16},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "olmo2": {},
    "smollm3": {},
    "cohere2": {"sliding_window": 24},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def build_model(name: str, **overrides: Any) -> torch.nn.Module:
    """A random fp32 model; weights are large enough that attention is far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = AutoConfig.for_model(name.split("-")[0], **(COMMON | FAMILIES[name] | overrides))
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "sink" in parameter_name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() >= 2:
                scale = 0.5 if "embed" in parameter_name else 0.12
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


@functools.cache
def adapter(name: str) -> DecoderAdapter:
    return DecoderAdapter(build_model(name), torch.device("cpu"))


def native_logits(model: DecoderAdapter, ids: torch.Tensor) -> torch.Tensor:
    """The model's own eager forward: the truth everything is compared with. [n, vocabulary]"""
    with torch.inference_mode(), model.native() as native:
        return native(input_ids=ids[None], use_cache=False).logits[0]


def random_ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(seed))
