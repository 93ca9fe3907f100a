"""Fixtures that load nothing until a test asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a byte tokenizer (one token a byte) and a chat template; what it says is noise."""
    directory = tmp_path_factory.mktemp("tiny-model")
    write_tiny_model(directory)
    return directory


def write_tiny_model(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.matrix import build_model

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate((*SPECIAL_TOKENS, *alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
    model = build_model("llama", vocab_size=len(SPECIAL_TOKENS) + len(alphabet), max_position_embeddings=8192)
    model.save_pretrained(directory)
