"""What two shapes have in common is what their prompts have in common, and nothing can be read from one."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.core.keys import ModelFingerprint
from kvweave.core.prompt import Document, TokenPrompt, TokenSpan
from kvweave.server.shape import STRIDE, RequestShape
from tests.server.shapes import KEY, MODEL, shape, tokenise, words

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=200)


def of(ids: list[int], key: bytes = KEY) -> RequestShape:
    return RequestShape.of(TokenPrompt((TokenSpan(tuple(ids)),)), key=key, fingerprint=MODEL)


@settings(deadline=None)
@given(TOKENS, TOKENS, st.integers(0, 150))
def test_common_is_never_too_long_and_misses_less_than_a_stride(a: list[int], b: list[int], shared: int) -> None:
    b = a[:shared] + b
    real = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    common = of(a).common(of(b))
    assert common <= real
    assert real - common < STRIDE


def test_pieces_follow_messages_and_segments() -> None:
    made = shape(("system", "be brief"), ("user", ["look at", Document("one two", id="doc:1"), Document("x"), "so ?"]))
    assert [(p.kind, p.start, p.stop, p.message, p.segment) for p in made.pieces] == [
        ("system", 0, 4, 0, None),
        ("message", 4, 7, 1, None),
        ("document", 7, 9, 1, "doc:1"),
        ("document", 9, 10, 1, "document-1"),
        ("message", 10, 13, 1, None),
        ("template", 13, 14, 2, None),
    ]
    assert made.piece_at(8).segment == "doc:1"
    assert made.piece_at(99).kind == "template"
    assert made.num_tokens == len(tokenise(("system", "be brief"), ("user", "look at one two x so ?"))[0].token_ids)


def test_common_reaches_the_end_of_the_last_equal_piece() -> None:
    a = shape(("system", words(50)), ("user", "who ?"))
    b = shape(("system", words(50)), ("user", "when was it ?"))
    assert a.common(b) == 52  # the system message
    assert a.common(a) == a.num_tokens
    assert a.common(shape(("system", words(50, 1)), ("user", "who ?"))) == 0


def test_a_shape_survives_json() -> None:
    made = shape(("system", words(100)), ("user", ["q", Document("d e", id="doc:1")]), tools="t").answered(
        KEY, ["yes", "no"]
    )
    again = RequestShape.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert again.answers == made.answered(KEY, [" yes\n", "no"]).answers


def test_no_text_and_no_ids_are_kept_and_the_key_matters() -> None:
    prompt = [("system", "unmistakable"), ("user", "secretword")]
    stored = json.dumps(shape(*prompt, tools="toolname", salt="saltvalue").answered(KEY, ["answertext"]).to_json())
    for text in ("unmistakable", "secretword", "toolname", "saltvalue", "answertext"):
        assert text not in stored
    one, other = of([1, 2, 3]), of([1, 2, 3], key=bytes(32))
    assert one.common(other) == 0
    assert one.system != other.system


def test_salt_and_model_make_another_context() -> None:
    turn = ("user", "q")
    contexts = {shape(turn).context, shape(turn, salt="a").context, shape(turn, salt="b").context}
    assert len(contexts | {shape(turn, model=ModelFingerprint.of(content="n")).context}) == 4
    assert shape(turn).context == shape(("user", "another")).context


def test_landmarks_are_few_and_among_the_marks() -> None:
    made = of(list(range(10_000)))
    landmarks = made.landmarks()
    assert [at for at, _ in landmarks] == [32 * 2**k for k in range(9)] + [10_000]
    assert {mark for _, mark in landmarks} <= set(made.marks)
