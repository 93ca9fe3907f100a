"""What a GGUF file says about a model's shape, as a Hugging Face configuration.

transformers has a reader of its own, but it drops what changes the output (rope scaling, query scale of the large Gemma
models, ...) without a word. This one knows fewer architectures and refuses every key and tensor it doesn't understand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvweave.errors import BrokenModel, UnsupportedModel
from kvweave.models.gguf_file import GgufFile

_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_OUTPUT = {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_down": "mlp.down_proj"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = {**_ATTENTION, **_OUTPUT, **_GATED, "ffn_norm": "post_attention_layernorm"}
_GEMMA = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI = {
    **_OUTPUT,
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_norm": "post_attention_layernorm",
}

# Keys every architecture may have. Those that aren't read here don't change the model's output.
_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}
_SOFTCAP = {"attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"}
# The one layer count whose Gemma models divide queries by the root of hidden/heads instead of the root of head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True)
class Architecture:
    """One architecture of GGUF files and the Hugging Face classes that run it."""

    model_type: str
    causal_lm: str
    names: Mapping[str, str]  # tensor of a block in the file -> module of a layer
    extra: Callable[[GgufFile, dict[str, Any]], dict[str, Any]]  # (file, common fields) -> more fields
    keys: frozenset[str] = frozenset()  # metadata beyond the common ones
    interleaved: bool = False  # q and k rows lie in rotary pairs (0, d/2, 1, d/2+1, ...)
    norm_offset: float = 0.0  # added to norm weights to get the Hugging Face ones
    always_tied: bool = False


def architecture(file: GgufFile) -> Architecture:
    """The architecture of ``file``; :class:`UnsupportedModel` if it isn't one whose conversion is tested."""
    known = ARCHITECTURES.get(file.architecture)
    if known is None:
        raise UnsupportedModel(
            f"GGUF architecture '{file.architecture}' is not supported (supported: {', '.join(ARCHITECTURES)}). "
            "Use the model's safetensors directory instead."
        )
    strange = sorted(file.own_keys() - _KEYS - known.keys)
    if strange or int(file.own("expert_count", 0)) > 0:
        key = f"{file.architecture}.{strange[0] if strange else 'expert_count'}"
        raise UnsupportedModel(f"'{file.path.name}' sets '{key}', which kvweave can't convert.")
    return known


def model_config(file: GgufFile, *, tied: bool) -> dict[str, Any]:
    """The fields of the model's ``config.json``; ``tied`` says that the output projection is the embedding."""
    known = architecture(file)
    hidden, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    fields: dict[str, Any] = {
        "model_type": known.model_type,
        "architectures": [known.causal_lm],
        "dtype": "bfloat16",
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_hidden_layers": _number(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": _number(file, "attention.key_length", hidden // heads),
        "max_position_embeddings": _number(file, "context_length"),
        "rms_norm_eps": float(file.own("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": tied,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", None),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", None),
    }
    if _number(file, "attention.value_length", fields["head_dim"]) != fields["head_dim"]:
        raise UnsupportedModel(f"'{file.path.name}' has keys and values of different sizes, which kvweave can't convert.")
    return fields | known.extra(file, fields)


def weight_names(file: GgufFile, *, tied: bool) -> dict[str, str]:
    """Hugging Face name -> tensor of the file, for all weights; the rope factors are part of the configuration.

    Raises :class:`UnsupportedModel` for a tensor without a place in the model.
    """
    known = architecture(file)
    names = {"model.norm.weight": "output_norm.weight"}
    embedding = "token_embd.weight"
    if tied and "output.weight" in file.tensors:
        # Both are the same matrix, quantised differently: keep the finer one.
        embedding = max(embedding, "output.weight", key=lambda name: file.tensors[name].n_bytes)
    elif not tied:
        names["lm_head.weight"] = "output.weight"
    names["model.embed_tokens.weight"] = embedding
    top = {"output_norm.weight", "token_embd.weight", "output.weight", *_ROPE_TENSORS}
    for tensor in file.tensors.keys() - top:
        module = None
        if tensor.count(".") == 3:
            block, index, key, suffix = tensor.split(".")
            module = known.names.get(key) if block == "blk" else None
        if module is None:
            raise UnsupportedModel(f"'{file.path.name}' has the tensor '{tensor}', which kvweave can't convert.")
        names[f"model.layers.{index}.{module}.{suffix}"] = tensor
    return names


def is_tied(file: GgufFile) -> bool:
    """Whether embedding and output projection are one matrix.

    A quantiser may write a tied matrix twice, with different precision: the two copies then point the same way, which
    independent matrices don't.
    """
    if architecture(file).always_tied or "output.weight" not in file.tensors:
        return True
    if file.shape("output.weight") != file.shape("token_embd.weight"):
        return False
    from torch.nn.functional import cosine_similarity

    one, other = file.sample("token_embd.weight", 256), file.sample("output.weight", 256)
    # 2-bit copies of one matrix still reach 0.9; rows of padding are zero, so the median says more than the mean.
    return float(cosine_similarity(one, other).median()) > 0.8


_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _llama(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    # Files without a key length state the head size as the number of rotated dimensions.
    head_dim = _number(file, "attention.key_length", _number(file, "rope.dimension_count", fields["head_dim"]))
    fields["head_dim"] = head_dim
    return {
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_parameters": _rope(file, fields),
    }


def _qwen(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None, "rope_parameters": _rope(file, fields)}


def _gemma2(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_query_scale(file, fields),
        "sliding_window": _number(file, "attention.sliding_window"),
        "attn_logit_softcapping": float(file.own("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(file.own("final_logit_softcapping", 30.0)),
        "rope_parameters": _rope(file, fields),
    }


def _gemma3(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    softcap = file.own("final_logit_softcapping", None)
    period = _number(file, "attention.sliding_window_pattern", 6)
    layers = range(1, fields["num_hidden_layers"] + 1)
    local = {"rope_type": "default", "rope_theta": float(file.own("rope.freq_base_swa", 10000.0))}
    return {
        "query_pre_attn_scalar": _gemma_query_scale(file, fields),
        "sliding_window": _number(file, "attention.sliding_window"),
        "layer_types": ["sliding_attention" if layer % period else "full_attention" for layer in layers],
        "final_logit_softcapping": None if softcap is None else float(softcap),
        "rope_parameters": {"full_attention": _rope(file, fields, theta=1e6), "sliding_attention": local},
    }


def _phi3(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    rotated = _number(file, "rope.dimension_count", fields["head_dim"])
    original = _number(file, "rope.scaling.original_context_length", fields["max_position_embeddings"])
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.own("rope.freq_base", 10000.0))}
    if "rope_factors_long.weight" in file.tensors:
        rope["rope_type"] = "longrope"
        for kind in ("long", "short"):
            rope[f"{kind}_factor"] = file.sample(f"rope_factors_{kind}.weight", rotated).flatten().tolist()
        rope["original_max_position_embeddings"] = original
        if (factor := file.own("rope.scaling.attn_factor", None)) is not None:
            rope["attention_factor"] = float(factor)
    elif file.own("rope.scaling.type", "none") != "none":
        raise UnsupportedModel(f"'{file.path.name}' scales the rotary embedding in a way kvweave can't convert.")
    rope["partial_rotary_factor"] = rotated / fields["head_dim"]
    return {
        "sliding_window": _number(file, "attention.sliding_window", 0) or None,  # 0 stands for no window
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def _gemma_query_scale(file: GgufFile, fields: dict[str, Any]) -> int:
    if fields["num_hidden_layers"] == _GEMMA_27B_LAYERS[file.architecture]:
        return fields["hidden_size"] // fields["num_attention_heads"]
    return fields["head_dim"]


def _rope(file: GgufFile, fields: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """The ``rope_parameters`` of a model that rotates whole heads."""
    if _number(file, "rope.dimension_count", fields["head_dim"]) != fields["head_dim"]:
        raise UnsupportedModel(f"'{file.path.name}' rotates only a part of each head, which kvweave can't convert.")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.own("rope.freq_base", theta))}
    scaling = file.own("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3_rope(file, rope["rope_theta"], fields["head_dim"])
    if scaling == "none":
        return rope
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModel(f"'{file.path.name}' uses the rope scaling '{scaling}', which kvweave can't convert.")
    rope |= {"rope_type": scaling, "factor": float(file.own("rope.scaling.factor"))}
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = _number(file, "rope.scaling.original_context_length")
    return rope


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, of which a file has only the resulting divisor of each frequency."""
    divisors = [float(value) for value in file.sample("rope_freqs.weight", head_dim).flatten()]
    low, high, original, factor = 1.0, 4.0, 8192, max(divisors)
    for index, divisor in enumerate(divisors):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        blend = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        if not math.isclose(divisor, 1 / ((1 - blend) / factor + blend), rel_tol=1e-3):
            raise UnsupportedModel(f"'{file.path.name}' has rope factors that are not those of Llama 3, so it is refused.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _number(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.own(key, default) if default is not None else file.own(key)
    if isinstance(value, list):  # one value a layer
        if len(set(value)) != 1:
            raise UnsupportedModel(
                f"'{file.path.name}' has layers of different shapes ('{key}'), which kvweave can't convert."
            )
        value = value[0]
    if not isinstance(value, int):
        raise BrokenModel(f"'{file.path.name}' states {value!r} for '{key}', which is not a whole number.")
    return value


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, _llama, interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA, _qwen),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**_LLAMA, **_HEAD_NORMS}, _qwen),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", _GEMMA, _gemma2, frozenset(_SOFTCAP), norm_offset=-1.0, always_tied=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_GEMMA, **_HEAD_NORMS},
        _gemma3,
        frozenset(_SOFTCAP | {"attention.sliding_window_pattern", "rope.freq_base_swa"}) - {"attn_logit_softcapping"},
        norm_offset=-1.0,
        always_tied=True,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _PHI,
        _phi3,
        frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
    ),
}
