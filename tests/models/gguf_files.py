"""Tiny GGUF files for tests, written from random models the way llama.cpp's converter would.

The conventions come from there and not from the code under test: names from the ``gguf`` package, q and k of the llama
architecture interleaved, one added to the norm weights of Gemma.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from kvweave.errors import KvweaveError
from kvweave.models.sources import ModelSource, resolve

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "1 2", "h i"]
WORDS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
VOCABULARY = 288  # more rows than tokens, as in many real models
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOKEN_IDS = torch.arange(40).unsqueeze(0) * 7 % VOCABULARY

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
# (architecture of the file, Hugging Face model type, fields that differ from SHAPE)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama-3.2": ("llama", "llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-bias": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", "llama", {"head_dim": 32}),
    "mistral": ("llama", "mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", "qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma2-27b": (  # the one size whose queries are scaled by hidden/heads, told by its layers
        "gemma2",
        "gemma2",
        {"sliding_window": 8, "num_hidden_layers": 46, "head_dim": 32, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE},
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 12}),
    "phi3-long": ("phi3", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
}


def tiny_model(model_type: str, **fields: Any) -> Any:
    """A random model with weights that bfloat16 represents exactly."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SHAPE | fields)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0)).bfloat16().float())
    return model.eval()


def write_gguf(
    path: Path,
    architecture: str = "llama",
    model: Any = None,
    edit: Callable[[gguf.GGUFWriter, dict[str, torch.Tensor]], None] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    pre: str = "smollm",
) -> Path:
    """Write ``model`` as llama.cpp's converter would; ``edit`` may change metadata and tensors before the end."""
    model = model or tiny_model("llama", tie_word_embeddings=True)
    writer = gguf.GGUFWriter(path, architecture)
    write_shape(writer, architecture, model.config)
    write_tokenizer(writer, pre)
    tensors = file_tensors(architecture, model)
    if edit:
        edit(writer, tensors)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        array = tensor.detach().numpy()
        writer.add_tensor(name, gguf.quants.quantize(array, kind) if kind else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_shape(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * 16))


def write_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(WORDS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def file_tensors(architecture: str, model: Any) -> dict[str, torch.Tensor]:
    config = model.config
    number = gguf.MODEL_ARCH[architecture.upper()]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = {}
    for name, value in model.named_parameters():
        if architecture == "llama" and "q_proj" in name:
            value = interleave(value, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            value = interleave(value, config.num_key_value_heads)
        if architecture.startswith("gemma") and "norm" in name:
            value = value + 1
        stem, suffix = name.rsplit(".", 1)
        tensors[f"{names.get_name(stem)}.{suffix}"] = value
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        tensors["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = torch.tensor(rope[f"{kind}_factor"])
    return tensors


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The two halves of each head, row by row: what llama.cpp's converter calls permute."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape).contiguous()


def load(source: ModelSource) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32).eval()


def leftovers(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir()) if (home / "models").exists() else []


def refused(path: Path, home: Path, error: type[KvweaveError], *words: str) -> None:
    with pytest.raises(error) as caught:
        resolve(path, home=home)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert leftovers(home) == []
