"""Ids of pieces of text: the same wherever a document stands, never control tokens, the template's own without documents."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document, Prompt
from kvweave.errors import BrokenModel, InvalidOption, TemplateRefused
from kvweave.models.tokenizer import IncrementalDecoder, Tokenizer
from tests.models import templates

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "def main():\n    return {'key': [1, 2, 3]}\n\n\nÄrger über Öl: 漢字とかな 🙂🙃 été naïve",
    "<tool_call> </tool_call> <|user|> <|end|> user assistant  two  spaces\tand\ttabs",
] * 4
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
ADDED = ("<call>", "</call>", "\n\n\n", "<result>")  # not special; the template writes some


def bytes_like_gpt2() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def pieces_like_llama2() -> Backend:
    """A space is put in front of a text; what isn't in the vocabulary falls back to bytes."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    tokens = [*SPECIAL, *fallback]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=tokens, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator(CORPUS[::3], trainer)
    content = backend.to_str()
    for token in fallback:  # in the vocabulary, but no added tokens
        content = content.replace(f'"content": "{token}"', '"content": ""')
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def unigram_with_control_pieces() -> Backend:
    """Control tokens are ordinary pieces of the vocabulary as well."""
    pieces = [(token, -1.0) for token in (*SPECIAL, *ADDED)]
    backend = Backend(models.Unigram([*pieces, *((c, -5.0) for c in sorted({*"".join(CORPUS), "▁"}))], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend


FAMILIES: dict[str, Callable[[], Backend]] = {
    f.__name__: f for f in (bytes_like_gpt2, pieces_like_llama2, unigram_with_control_pieces)
}


def write(backend: Backend, directory: Path, chat_template: str | None) -> Tokenizer:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = chat_template
    wrapped.save_pretrained(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write(FAMILIES[request.param](), tmp_path_factory.mktemp(request.param), templates.CHATML)


def chat(*contents: Any, **options: Any) -> Conversation:
    return Conversation(tuple(Message("assistant" if i % 2 else "user", c) for i, c in enumerate(contents)), **options)


def test_without_documents_the_ids_are_the_templates_own(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": " Who?\n\n\nÄ <|end|>"}, {"role": "assistant", "content": "漢 She. "}]
    rendered = tokenizer.render(chat(*(m["content"] for m in messages)))
    theirs = tokenizer.backend.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(tokenizer.tokenise(rendered.prompt).token_ids) == list(theirs)


def test_documents_have_their_ids_in_any_order_with_any_neighbours(tokenizer: Tokenizer) -> None:
    documents = [Document(t) for t in ("The quick fox", "\n é 漢 of times", "ends in spaces  ", "<|end|>dog", "times")]
    alone = {d: tokenizer.encode_document(d.content) for d in documents}
    for order in permutations(documents, 3):
        for question in ("", "Who?", "\n\n"):
            prompt = tokenizer.render(chat((*order, question))).prompt
            spans = {s.document: list(s.token_ids) for s in tokenizer.tokenise(prompt).spans if s.document}
            assert spans == {d: alone[d] for d in order}
    assert [list(s.token_ids) for s in tokenizer.tokenise(Prompt([documents[0]])).spans if s.document] == [
        alone[documents[0]]
    ]


TEXTS = st.text(st.one_of(st.sampled_from("ab \n\t<|>é漢🙂"), st.characters(codec="utf-8")), max_size=20)
KNOWN = st.text(st.sampled_from(sorted({*"".join(CORPUS)})), max_size=20)
PIECES = st.lists(st.one_of(TEXTS, st.sampled_from((*SPECIAL, *ADDED))), max_size=6).map("".join)


@settings(deadline=None)
@given(text=PIECES)
def test_documents_hold_no_control_tokens(tokenizer: Tokenizer, text: str) -> None:
    control = set(tokenizer.backend.convert_tokens_to_ids([*SPECIAL[1:], "<call>", "</call>", "<result>"]))
    assert not control.intersection(tokenizer.encode_document(text))


def test_text_does_hold_them(tokenizer: Tokenizer) -> None:
    for token in ("<|end|>", "<call>"):
        assert tokenizer.backend.convert_tokens_to_ids(token) in tokenizer.encode_text(f"a{token}b")
    newlines = tokenizer.backend.convert_tokens_to_ids("\n\n\n")
    assert newlines in tokenizer.encode_document("a\n\n\nb"), "an added token that controls nothing"


@settings(deadline=None)
@given(before=KNOWN, text=KNOWN)
def test_nothing_is_added_between_pieces(tokenizer: Tokenizer, before: str, text: str) -> None:
    document = Document(f"x{before}x")
    ids = tokenizer.tokenise(Prompt(["<|user|>", document, f"y{text}"], add_bos=False)).token_ids
    assume("\n\n\n" not in before + text)  # some tokenizers put a space behind every added token
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|user|>{document.content}y{text}"


def test_owners_of_tokens(tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    rendered = tokenizer.render(chat((Document("The quick fox"), "Who?"), " It was. ", "漢🙂", tools=(tool,)))
    ids, owners = tokenizer.tokenise(rendered.prompt).token_ids, tokenizer.owners(rendered)
    assert len(ids) == len(owners)
    assert owners == sorted(owners)
    first = [owners.index(n) for n in range(4)]
    user, assistant = (tokenizer.backend.convert_tokens_to_ids(t) for t in ("<|user|>", "<|assistant|>"))
    assert first[0] == 0, "tools belong to the first message"
    assert [ids[i] for i in first[1:]] == [assistant, user, assistant], "a message begins with its header"


def test_a_token_across_two_messages_belongs_to_the_first(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")]))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    wrapped.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    wrapped.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    rendered = tokenizer.render(chat("ba", "ba", "b", add_generation_prompt=False))
    assert tokenizer.tokenise(rendered.prompt).token_ids == (2, 3, 3)
    assert tokenizer.owners(rendered) == [0, 0, 1], "message 2 owns no token"


@pytest.mark.parametrize(
    ("source", "reason"), [(templates.COLLECTED, "template_opaque"), (templates.BACKWARDS, "template_order")]
)
def test_conversations_without_owners(source: str, reason: str, tmp_path: Path) -> None:
    tokenizer = write(bytes_like_gpt2(), tmp_path, source)
    with pytest.raises(TemplateRefused, match=reason):
        tokenizer.owners(tokenizer.render(chat("Who?", "She.")))


def test_bos_only_in_front_of_plain_prompts(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer(tiny_model_dir)
    tokenizer.adds_bos = True
    assert tokenizer.tokenise(Prompt(["a"])).token_ids[0] == tokenizer.bos_id
    assert tokenizer.bos_id not in tokenizer.tokenise(tokenizer.render(chat("a")).prompt).token_ids


def test_templates_from_a_file_and_by_name(tmp_path: Path) -> None:
    write(bytes_like_gpt2(), tmp_path, None)
    bare = Tokenizer(tmp_path)
    assert (bare.has_chat_template, bare.chat_template) == (False, None)
    with pytest.raises(TemplateRefused, match="--chat-template"):
        bare.render(chat("a"))
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert Tokenizer(tmp_path, file).render(chat("a")).text == "a!"
    with pytest.raises(InvalidOption, match=r"none\.jinja"):
        Tokenizer(tmp_path, tmp_path / "none.jinja")
    several = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }} tools"}
    bare.backend.chat_template = several
    bare.backend.save_pretrained(tmp_path)
    named = Tokenizer(tmp_path)
    assert named.render(chat("a")).text == "a"
    assert named.render(chat("a", tools=({"type": "function"},))).text == "1 tools"
    assert named.chat_template == several["tool_use"]


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="can't be loaded"):
        Tokenizer(tmp_path)


@settings(deadline=None)
@given(text=PIECES, skip=st.booleans())
def test_pieces_of_text_are_the_text(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = [*tokenizer.encode_text(text), *tokenizer.encode_text("<|end|> é")]
    decoder = IncrementalDecoder(tokenizer, skip)
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids, skip)
    assert decoder.flush() == ""


def test_a_character_appears_when_it_is_complete(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer(tiny_model_dir)
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in tokenizer.encode_text("a🙂b")] == ["a", "", "", "", "🙂", "b"]
    assert decoder.push(tokenizer.encode_text("漢")[0]) == ""
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"


def test_decoding_costs_the_same_however_long_the_answer_is(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer(tiny_model_dir)
    lengths: list[int] = []

    class Counting:
        special_ids = tokenizer.special_ids

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            lengths.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens)

    broken = tokenizer.encode_text("漢")[0]
    for ids in ([broken] * 400, tokenizer.encode_text("漢🙂 a" * 100)):
        decoder = IncrementalDecoder(Counting())  # type: ignore[arg-type]
        for token in ids:
            decoder.push(token)
    assert max(lengths) <= 32
