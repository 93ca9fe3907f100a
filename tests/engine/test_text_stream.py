"""Text of an answer while it grows: stop strings under any cut."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvweave.engine.text_stream import TextStream

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


class Letters:
    """Token i is the i-th piece."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.rest


def feed(stream: TextStream, pieces: int) -> list[str]:
    shown = []
    for i in range(pieces):
        shown.append(stream.push(i))
        if stream.stopped:
            return shown
    return [*shown, stream.flush()]


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """End and start of what stops ``text`` when it is read character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return end, min(starts)
    return None


@given(pieces=st.lists(st.text("abc", max_size=3), max_size=10), rest=st.text("abc", max_size=3), stops=STOPS)
@example(pieces=["ab", "cd"], rest="", stops=["abcd", "bc"])
@example(pieces=["abcd"], rest="", stops=["abcd", "bc"])
def test_text_ends_at_the_stop_that_is_complete_first_under_any_cut(pieces: list[str], rest: str, stops: list[str]) -> None:
    full = "".join(pieces) + rest
    found = first_stop(full, stops)
    for include in (False, True):
        stream = TextStream(Letters(pieces, rest), tuple(stops), include_stop=include)
        shown = "".join(feed(stream, len(pieces)))
        assert shown == stream.text
        assert stream.stopped == (found is not None)
        assert shown == (full if found is None else full[: found[0] if include else found[1]])


@given(pieces=st.lists(st.text("abc", max_size=3), max_size=10), stops=STOPS)
def test_no_more_is_held_back_than_could_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    stream = TextStream(Letters(pieces), tuple(stops))
    for i in range(len(pieces)):
        stream.push(i)
        if stream.stopped:
            return
        full = "".join(pieces[: i + 1])
        held = full[len(stream.text) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)
        assert not any(s.startswith(full[at:]) for s in stops for at in range(len(stream.text)))  # what is shown stays


def test_stops_within_the_first_tokens_stop_nothing() -> None:
    pieces = ["ab", "ab", "xa", "b"]
    stream = TextStream(Letters(pieces), ("ab",), min_tokens=2)
    assert feed(stream, 4) == ["ab", "ab", "x", ""]
    assert stream.text == "ababx"
    late = TextStream(Letters(pieces), ("ab",), min_tokens=9)
    assert "".join(feed(late, 4)) == "ababxab"
    assert not late.stopped


def test_a_stop_that_was_complete_early_does_not_count_later() -> None:
    stream = TextStream(Letters(["ab", "z"]), ("b", "abc"), min_tokens=1)
    assert "".join(feed(stream, 2)) == "abz"
    assert not stream.stopped


def test_what_is_searched_does_not_grow_with_the_answer() -> None:
    total = 0

    class Stream(TextStream):
        def _ends(self, text: str, old: int) -> list[tuple[int, int]]:
            nonlocal total
            total += len(text)
            return super()._ends(text, old)

    n = 2000
    stream = Stream(Letters(["word "] * n), ("word word!", "END"))
    feed(stream, n)
    assert n < total < n * 20
    assert stream.text == "word " * n
