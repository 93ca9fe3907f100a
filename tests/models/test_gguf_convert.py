"""A converted GGUF file is the same model, or it is refused and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import FAMILIES, TOKEN_IDS, load, refused, tiny_model, write_gguf

from kvweave.errors import BrokenModel, UnsupportedModel
from kvweave.models import gguf_convert
from kvweave.models.sources import resolve


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama GGUF file that converts."""
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_model_computes_the_same(family: str, tmp_path: Path, home: Path) -> None:
    architecture, model_type, fields = FAMILIES[family]
    model = tiny_model(model_type, **fields)
    source = resolve(write_gguf(tmp_path / "tiny.gguf", architecture, model), home=home)
    converted = load(source)
    with torch.no_grad():
        torch.testing.assert_close(converted(TOKEN_IDS).logits, model(TOKEN_IDS).logits, rtol=1e-5, atol=1e-5)
    assert converted.config.max_position_embeddings == 128
    assert json.loads((source.directory / "config.json").read_text())["dtype"] == "bfloat16"
    assert converted.config.eos_token_id == 2


def test_the_comparison_can_fail(tmp_path: Path, home: Path) -> None:
    """Without the interleaving of q and k the same file is another model."""
    model = tiny_model("llama", num_key_value_heads=4)

    def swap(_: gguf.GGUFWriter, tensors: dict[str, torch.Tensor]) -> None:
        tensors["blk.0.attn_q.weight"] = model.model.layers[0].self_attn.q_proj.weight

    converted = load(resolve(write_gguf(tmp_path / "tiny.gguf", "llama", model, swap), home=home))
    with torch.no_grad():
        assert (converted(TOKEN_IDS).logits - model(TOKEN_IDS).logits).abs().max() > 0.1


def test_tied_matrix_written_twice_keeps_the_finer_copy(tmp_path: Path, home: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight

    def twice(_: gguf.GGUFWriter, tensors: dict[str, torch.Tensor]) -> None:
        tensors["output.weight"] = embedding

    types = gguf.GGMLQuantizationType
    kinds = {"token_embd.weight": types.Q4_0, "output.weight": types.Q8_0}
    converted = load(resolve(write_gguf(tmp_path / "tiny.gguf", "llama", model, twice, kinds), home=home))
    assert converted.config.tie_word_embeddings
    error = (converted.model.embed_tokens.weight - embedding).abs().max()
    assert error < 0.01  # a step of the 8-bit copy; the 4-bit copy is off by ten times as much


def test_untied_model_keeps_both_matrices(tmp_path: Path, home: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    converted = load(resolve(write_gguf(tmp_path / "tiny.gguf", "llama", model), home=home))
    assert not converted.config.tie_word_embeddings
    assert torch.equal(converted.lm_head.weight, model.lm_head.weight)


def test_large_models_are_written_in_shards(tiny: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(resolve(tiny, home=tmp_path / "other"))
    monkeypatch.setattr(gguf_convert, "SHARD_BYTES", 50_000)
    source = resolve(tiny, home=home)
    files = sorted(file.name for file in source.directory.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for name, value in load(source).state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])


def test_files_have_the_usual_permissions(tiny: Path, home: Path) -> None:
    folder = resolve(tiny, home=home).directory
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["ĠĠ", "1", "2"]), ("gpt-2", ["Ġ", "Ġ", "12"])])
def test_tokenizer_splits_as_trained(pre: str, pieces: list[str], tmp_path: Path, home: Path) -> None:
    from transformers import AutoTokenizer

    source = resolve(write_gguf(tmp_path / "tiny.gguf", pre=pre), home=home)
    tokenizer = AutoTokenizer.from_pretrained(source.directory)
    assert tokenizer.tokenize("hi  12") == ["hi", *pieces]
    text = "<|im_start|>user\nIn 2024, 3.14 of 12  cats\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.bos_token == "<|im_start|>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("add_bos", [None, False])
def test_llama3_tokenizer(add_bos: bool | None, tmp_path: Path, home: Path) -> None:
    from transformers import AutoTokenizer

    def edit(writer: gguf.GGUFWriter, _: dict[str, torch.Tensor]) -> None:
        del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        writer.kv_data[0]["tokenizer.ggml.tokens"].value.append("hello")  # no merges lead to it
        writer.kv_data[0]["tokenizer.ggml.token_type"].value.append(1)

    source = resolve(write_gguf(tmp_path / "tiny.gguf", edit=edit, pre="llama-bpe"), home=home)
    tokenizer = AutoTokenizer.from_pretrained(source.directory)
    start = [] if add_bos is False else ["<|im_start|>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello12").input_ids) == [*start, "hello", "12"]


def test_all_end_tokens_end_generation(tiny: Path, home: Path) -> None:
    from transformers import GenerationConfig

    assert GenerationConfig.from_pretrained(resolve(tiny, home=home).directory).eos_token_id == [2, 0]


@pytest.mark.parametrize("add_bos", [None, True, False])
def test_sentencepiece_tokenizer(add_bos: bool | None, tmp_path: Path, home: Path) -> None:
    from transformers import AutoTokenizer

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 5]

    def sentencepiece(writer: gguf.GGUFWriter, _: dict[str, torch.Tensor]) -> None:
        data = writer.kv_data[0]
        for key in [key for key in data if key.startswith("tokenizer.")]:
            del data[key]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_types(kinds)
        writer.add_token_scores([-float(index) for index in range(len(words))])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    source = resolve(write_gguf(tmp_path / "tiny.gguf", edit=sentencepiece), home=home)
    tokenizer = AutoTokenizer.from_pretrained(source.directory)
    start = [] if add_bos is False else ["<s>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("hi hi7").input_ids) == [*start, "▁hi", "▁hi", "<0x37>"]


def test_conversion_is_silent_and_reports_progress(tiny: Path, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    resolve(tiny, home=home, progress=lines.append)
    assert capfd.readouterr() == ("", "")
    assert lines[0] == "Converting tiny.gguf (once)"
    assert lines[1] == "Converting tiny.gguf: 0%"
    assert all("\n" not in line for line in lines)


def edited(path: Path, edit: Callable[[gguf.GGUFWriter, dict[str, torch.Tensor]], None]) -> Path:
    return write_gguf(path / "tiny.gguf", edit=edit)


@pytest.mark.parametrize("content", [b"", b"GG", b"hello, this is no model", b"GGUF", b"GGUF" + bytes(range(256)) * 4])
def test_garbage(content: bytes, tmp_path: Path, home: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    refused(path, home, BrokenModel, "bad.gguf")


@pytest.mark.parametrize("share", [0.001, 0.01, 0.02, 0.1, 0.5, 0.99])
def test_truncated(share: float, tiny: Path, tmp_path: Path, home: Path) -> None:
    content = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, home, BrokenModel, "cut.gguf", "truncated")


def test_missing_tensor(tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda _, tensors: tensors.pop("blk.1.ffn_up.weight"))
    refused(path, home, BrokenModel, "lacks 1 tensors", "model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q.scale", "blk.7.ffn_up.weight", "v.patch"])
def test_tensor_without_a_place(name: str, tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda _, tensors: tensors.update({name: torch.ones(8)}))
    refused(path, home, UnsupportedModel, name)


def test_wrong_shape(tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda _, tensors: tensors.update({"blk.0.attn_norm.weight": torch.ones(8)}))
    refused(path, home, BrokenModel, "blk.0.attn_norm.weight", "(8,)", "(64,)")


def test_other_architecture(tmp_path: Path, home: Path) -> None:
    path = edited(
        tmp_path, lambda writer, _: writer.add_key_value("general.architecture", "mamba", gguf.GGUFValueType.STRING)
    )
    refused(path, home, UnsupportedModel, "mamba", "llama, qwen2")


def test_key_that_changes_the_output(tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda writer, _: writer.add_logit_scale(2.0))
    refused(path, home, UnsupportedModel, "llama.logit_scale")


def test_experts(tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda writer, _: writer.add_expert_count(8))
    refused(path, home, UnsupportedModel, "expert_count")


def test_partial_rotation(tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda writer, _: writer.add_key_length(32))
    refused(path, home, UnsupportedModel, "only a part of each head")


def test_unknown_rope_factors(tmp_path: Path, home: Path) -> None:
    factors = torch.linspace(1, 3, 8)
    path = edited(tmp_path, lambda _, tensors: tensors.update({"rope_freqs.weight": factors}))
    refused(path, home, UnsupportedModel, "rope factors")


def test_layers_of_different_shapes(tmp_path: Path, home: Path) -> None:
    def edit(writer: gguf.GGUFWriter, _: dict[str, torch.Tensor]) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_head_count_kv([2, 1])

    refused(edited(tmp_path, edit), home, UnsupportedModel, "different shapes")


def test_missing_key(tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda writer, _: writer.kv_data[0].pop("llama.block_count"))
    refused(path, home, BrokenModel, "llama.block_count")


def test_values_that_make_no_model(tmp_path: Path, home: Path) -> None:
    def edit(writer: gguf.GGUFWriter, _: dict[str, torch.Tensor]) -> None:
        del writer.kv_data[0]["llama.attention.head_count"]
        writer.add_head_count(7)

    refused(edited(tmp_path, edit), home, BrokenModel, "tiny.gguf")


def test_one_part_of_several(tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda writer, _: writer.add_uint16("split.count", 3))
    refused(path, home, UnsupportedModel, "--merge")


@pytest.mark.parametrize("pre", ["martian", "default"])
def test_unknown_way_to_split_text(pre: str, tmp_path: Path, home: Path) -> None:
    refused(write_gguf(tmp_path / "tiny.gguf", pre=pre), home, UnsupportedModel, pre)


def test_no_tokenizer(tmp_path: Path, home: Path) -> None:
    path = edited(tmp_path, lambda writer, _: writer.kv_data[0].pop("tokenizer.ggml.model"))
    refused(path, home, UnsupportedModel, "tokenizer")
