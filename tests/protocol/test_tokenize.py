"""Bodies of /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from kvweave.core.chat import Conversation, Message
from kvweave.errors import ConflictingFields, InvalidRequest
from kvweave.protocol.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenized,
    parse_detokenize,
    parse_tokenize,
    tokenized,
)

MESSAGES = [{"role": "user", "content": "Hello"}]


def test_a_prompt() -> None:
    assert parse_tokenize({"prompt": "a"}) == TokenizeRequest(None, "a", None)
    request = parse_tokenize({"model": "m", "prompt": "", "add_special_tokens": False, "return_token_strs": True})
    assert request == TokenizeRequest("m", "", None, add_special_tokens=False, return_token_strs=True)


def test_a_conversation() -> None:
    conversation = parse_tokenize({"messages": MESSAGES, "add_generation_prompt": False}).conversation
    assert conversation == Conversation((Message("user", "Hello"),), add_generation_prompt=False)


@pytest.mark.parametrize(
    "body", [{}, {"prompt": 1}, {"prompt": "a", "messages": MESSAGES}, {"messages": []}, {"prompt": None}]
)
def test_refused(body: dict[str, Any]) -> None:
    with pytest.raises((InvalidRequest, ConflictingFields)) as caught:
        parse_tokenize(body)
    assert caught.value.param in ("prompt", "messages")


def test_answers() -> None:
    assert tokenized([1, 2], 8) == {"count": 2, "max_model_len": 8, "tokens": [1, 2], "token_strs": None}
    assert tokenized([1], 8, ["a"])["token_strs"] == ["a"]
    assert detokenized("ab") == {"prompt": "ab"}


def test_detokenize() -> None:
    assert parse_detokenize({"tokens": [1, 2], "model": "m"}) == DetokenizeRequest("m", (1, 2))
    for tokens in (None, [-1], [1.0], ["1"], [True], "12"):
        with pytest.raises(InvalidRequest):
            parse_detokenize({"tokens": tokens})
