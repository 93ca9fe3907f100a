"""Tokenizers of published models, from the GGUF files in the folder named by KVWEAVE_TEST_CHAT_TEMPLATES."""

from __future__ import annotations

import os
from itertools import permutations
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvweave.core.chat import Conversation, Message
from kvweave.core.prompt import Document
from kvweave.models.tokenizer import IncrementalDecoder, Tokenizer
from tests.models import templates

FOLDER = os.environ.get("KVWEAVE_TEST_CHAT_TEMPLATES")
FILES = sorted(Path(FOLDER).glob("*.gguf")) if FOLDER else []
pytestmark = pytest.mark.skipif(not FILES, reason="KVWEAVE_TEST_CHAT_TEMPLATES names no folder with tokenizers")

TEXTS = (
    "The quick brown fox.",
    "Two\n\nparagraphs,\n   indented\tlines",
    "(été) 漢字 🙂🙃 'don't' 1234567",
    "user <s> </s> <|im_end|> <|endoftext|> <end_of_turn> [INST] <tool_call>",
)


@pytest.fixture(scope="module", params=FILES, ids=lambda f: f.stem.removeprefix("ggml-vocab-"))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file: Path = request.param
    try:
        theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # of a family that transformers doesn't read from GGUF
        pytest.skip(str(error)[:80])
    theirs.chat_template = templates.CHATML
    directory = tmp_path_factory.mktemp("tokenizer")
    theirs.save_pretrained(directory)
    return Tokenizer(directory)


def chat(*contents: str | Document) -> Conversation:
    return Conversation((Message("user", contents),))


def test_documents_have_their_ids_in_any_order(tokenizer: Tokenizer) -> None:
    documents = [Document(text) for text in TEXTS]
    alone = {d: tokenizer.encode_document(d.content) for d in documents}
    for order in permutations(documents, 3):
        spans = tokenizer.tokenise(tokenizer.render(chat(*order, " Who?")).prompt).spans
        assert {s.document: list(s.token_ids) for s in spans if s.document} == {d: alone[d] for d in order}


def test_pieces_together_are_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS[:3]:
        rendered = tokenizer.render(chat(Document(text), "Who?"))
        ids = tokenizer.tokenise(rendered.prompt).token_ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert "".join(decoded.split()) == "".join(rendered.text.split()), "some special tokens swallow white space"
        assert len(tokenizer.owners(rendered)) == len(ids)


def test_documents_hold_no_special_tokens(tokenizer: Tokenizer) -> None:
    special = set(tokenizer.special_ids) - {tokenizer.backend.unk_token_id}
    marks = "".join(tokenizer.backend.convert_ids_to_tokens(sorted(special)[:300]))
    assert special.intersection(tokenizer.encode_text(marks))
    assert not special.intersection(tokenizer.encode_document(marks))


def test_without_documents_the_ids_are_the_templates_own(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        messages = [{"role": "user", "content": text}]
        theirs = tokenizer.backend.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(tokenizer.tokenise(tokenizer.render_chat(messages)).token_ids) == theirs


def test_decoding_piece_by_piece(tokenizer: Tokenizer) -> None:
    ids = [i for text in TEXTS for i in tokenizer.encode_text(text * 3)]
    for skip in (True, False):
        decoder = IncrementalDecoder(tokenizer, skip)
        assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids, skip)
