"""Turning a GGUF file into a Hugging Face directory with bfloat16 safetensors, one tensor at a time.

transformers can load GGUF files too, but it needs accelerate, holds the whole model in memory, skips tensors it doesn't
know without a word and loses parts of the configuration (see ``gguf_config``). Here every tensor of the file must find
its place and every parameter of the model must be filled, with the right shape.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.errors import BrokenModel, NotEnoughSpace, UnsupportedModel
from kvweave.models.directory import CONFIG, INDEX, SINGLE
from kvweave.models.gguf_config import Architecture, architecture, is_tied, model_config, weight_names
from kvweave.models.gguf_file import GgufFile
from kvweave.models.workspace import HINT, require_space

if TYPE_CHECKING:
    import torch

# Part of the name of a converted directory: raise it whenever the result of a conversion changes.
CONVERTER = 1
SHARD_BYTES = 2_000_000_000  # held in memory while it is written
TOKENIZER_BYTES = 50_000_000  # room for config and tokenizer files, generously

CONTROL = 3  # token type of GGUF files
# Control tokens that end an answer; a file names only one end token, chat models often have two.
END_TOKENS = {"<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>"}
# transformers splits the text for these vocabularies like GPT-2, though they were trained with single digits.
DIGIT_SPLITTERS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
# For these splitting like GPT-2 is right.
LIKE_GPT2 = {"gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2"}
# A word that is in these vocabularies is one token, whatever the merges say, and a text starts with BOS unless the file
# says no. transformers knows neither.
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"}


def convert_gguf(source: Path, out: Path, progress: Callable[[str], None], title: str) -> None:
    """Write the model of the GGUF file ``source`` to the new directory ``out``; ``title`` names it in messages.

    Raises :class:`BrokenModel` (damaged or incomplete), :class:`UnsupportedModel` (not convertible without a doubt)
    or :class:`NotEnoughSpace`. The caller removes ``out`` after an error.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    file = GgufFile(source)
    architecture(file)
    count = sum(tensor.n_elements for tensor in file.tensors.values())
    require_space(out.parent, int(count) * 2 + TOKENIZER_BYTES, f"Converting {title}")
    tied = is_tied(file)
    config = _configure(AutoConfig.for_model, file, model_config(file, tied=tied))
    with torch.device("meta"):  # shapes only, no memory
        # The default dtype, because for another one transformers changes the default of all threads for a moment.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.get_default_dtype())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = weight_names(file, tied=tied)
    _match(file, names, shapes)
    out.mkdir()
    _save_tokenizer(file, out, config.vocab_size)
    config.save_pretrained(out)
    _save_generation_config(file, out)
    _save_weights(file, names, config, out, lambda percent: progress(f"Converting {title}: {percent}%"))


def _configure(for_model: Callable[..., Any], file: GgufFile, fields: dict[str, Any]) -> Any:
    try:
        return for_model(**fields)
    except Exception as error:  # the strict configuration classes raise several kinds
        reason = " ".join(str(error).split())
        raise BrokenModel(f"'{file.path.name}' doesn't describe a usable {fields['model_type']} model: {reason}") from error


def _match(file: GgufFile, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse unless the file fills exactly the parameters of the model, with their shapes."""
    absent = sorted(shapes.keys() - names.keys())
    if absent:
        raise BrokenModel(f"'{file.path.name}' lacks {len(absent)} tensors of the model, first '{absent[0]}'.")
    for name, tensor in names.items():
        if name not in shapes:
            raise UnsupportedModel(f"'{file.path.name}' has the tensor '{tensor}', for which the model has no place.")
        if tensor not in file.tensors:
            raise BrokenModel(f"'{file.path.name}' lacks the tensor '{tensor}'.")
        if file.shape(tensor) != shapes[name]:
            raise BrokenModel(
                f"'{file.path.name}' has '{tensor}' with shape {file.shape(tensor)} instead of {shapes[name]}."
            )


def _save_weights(file: GgufFile, names: Mapping[str, str], config: Any, out: Path, progress: Callable[[int], None]) -> None:
    shards = _shards(file, names)
    total = sum(len(shard) for shard in shards)
    known = architecture(file)
    done, told, where = 0, -1, {}
    for number, shard in enumerate(shards, start=1):
        target = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        state = {}
        for name in shard:
            if (percent := done * 100 // total // 10 * 10) > told:
                progress(percent)
                told = percent
            state[name] = _weight(file, known, names[name], config)
            where[name] = target
            done += 1
        _save_shard(state, out / target)
        shutil.copymode(out / CONFIG, out / target)  # safetensors makes files only their owner can read
    if len(shards) > 1:
        size = sum(2 * int(file.tensors[tensor].n_elements) for tensor in names.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(file: GgufFile, names: Mapping[str, str]) -> list[list[str]]:
    """The names of the weights by weight file; a file holds at most ``SHARD_BYTES``, or one larger tensor."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name in sorted(names):
        size = 2 * int(file.tensors[names[name]].n_elements)
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _weight(file: GgufFile, known: Architecture, tensor: str, config: Any) -> torch.Tensor:
    value = file.values(tensor, known.norm_offset if tensor.endswith("norm.weight") else 0.0)
    if known.interleaved and ".attn_q." in tensor:
        return _deinterleave(value, config.num_attention_heads)
    if known.interleaved and ".attn_k." in tensor:
        return _deinterleave(value, config.num_key_value_heads)
    return value


def _deinterleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k, [heads * d, ...]: from rotary pairs side by side to the halves that transformers rotates."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def _save_shard(state: dict[str, torch.Tensor], target: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(state, target, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps the operating system's error as text
        if "os error 28" in str(error):
            raise NotEnoughSpace(f"The disk of '{target.parent.parent.parent}' is full. {HINT}") from error
        raise OSError(str(error)) from error


def _save_tokenizer(file: GgufFile, out: Path, vocab_size: int) -> None:
    """Save tokenizer and chat template, after checking that the saved tokenizer splits text like the one in memory."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        # Straight from the file: from_pretrained would mix in tokenizer files that lie next to it.
        tokenizer = PreTrainedTokenizerFast(name_or_path=str(file.path.parent), gguf_file=file.path.name)
        _fix_splitting(file, tokenizer.backend_tokenizer)
        default = file.get("tokenizer.ggml.model") == "llama" or file.get("tokenizer.ggml.pre", None) in WHOLE_WORDS
        tokenizer.add_bos_token = bool(file.get("tokenizer.ggml.add_bos_token", default))
        tokenizer.add_eos_token = bool(file.get("tokenizer.ggml.add_eos_token", False))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"The tokenizer in '{file.path.name}' can't be rebuilt: {reason}") from error
    if len(tokenizer) > vocab_size:
        raise BrokenModel(f"'{file.path.name}' has {len(tokenizer)} tokens but embeddings for {vocab_size} only.")
    tokenizer.save_pretrained(out)
    probe = "  x = 3.14159;\n\tMr. Müller's 12  cats\n\n 猫 <|im_end|></s> end "
    if AutoTokenizer.from_pretrained(out)(probe).input_ids != tokenizer(probe).input_ids:
        raise UnsupportedModel(f"The tokenizer in '{file.path.name}' doesn't survive being saved.")


def _fix_splitting(file: GgufFile, backend: Any) -> None:
    """Make the tokenizer cut text into pieces before merging as its vocabulary was trained, or refuse (ValueError)."""
    from tokenizers import pre_tokenizers

    kind, style = file.get("tokenizer.ggml.model", None), file.get("tokenizer.ggml.pre", None)
    if kind == "llama" and file.architecture == "llama" and not file.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError("it puts no space before the first word")
    if kind != "gpt2":
        return
    if style in DIGIT_SPLITTERS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif style not in LIKE_GPT2 and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        raise ValueError(f"its way to split text, '{style}', is not known")
    if style in WHOLE_WORDS:
        backend.model.ignore_merges = True


def _save_generation_config(file: GgufFile, out: Path) -> None:
    from transformers import GenerationConfig

    tokens = file.get("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", [])
    ends = [file.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    ends += [index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if _ends(token, kind)]
    GenerationConfig(
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", None),
        eos_token_id=list(dict.fromkeys(index for index in ends if index is not None)) or None,
        pad_token_id=file.get("tokenizer.ggml.padding_token_id", None),
    ).save_pretrained(out)


def _ends(token: str, kind: int) -> bool:
    return kind == CONTROL and token in END_TOKENS
