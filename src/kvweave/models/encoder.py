"""Text to ids with the tokenizers library, piece by piece: nothing is added between pieces, no state is shared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Encoded:
    """Ids, and for each the characters it stands for (start and end; equal if it stands for none)."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def moved(self, by: int) -> Encoded:
        return Encoded(self.ids, [(start + by, end + by) for start, end in self.offsets])

    def __add__(self, other: Encoded) -> Encoded:
        return Encoded(self.ids + other.ids, self.offsets + other.offsets)


class Encoder:
    """Ids of pieces of a text. Thread-safe.

    ``backend`` is the content of a tokenizer.json. ``never`` holds the ids of added tokens that text doesn't become, even if
    it looks like them; all others are recognised.
    """

    def __init__(self, backend: Mapping[str, Any], never: frozenset[int] = frozenset()) -> None:
        from tokenizers import Tokenizer

        # Which tokens text doesn't become is a property of the library's tokenizer: those marked as special. The
        # post-processor adds tokens, which isn't wanted here, and may cut white space off offsets.
        added = [{**token, "special": token["id"] in never} for token in backend["added_tokens"]]
        own = {**backend, "added_tokens": added, "post_processor": None, "truncation": None, "padding": None}
        self._backend: Any = Tokenizer.from_str(json.dumps(own))
        self._backend.encode_special_tokens = bool(never)
        self._never = {token["id"]: token["content"] for token in added if token["special"]}
        self._newline = self._plain("\n").ids
        self._adds_space = self._inside("x").ids != self._plain("x").ids

    def encode(self, text: str, *, inside: bool = False) -> Encoded:
        """Ids of ``text``; ``inside``: behind other text, so that the space some tokenizers begin a text with is wrong."""
        encoded = self._inside(text) if inside and self._adds_space else self._plain(text)
        for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            # A vocabulary may hold the text of a control token as an ordinary piece: then the text is taken apart.
            if end - start > 1 and self._never.get(token) == text[start:end]:
                cut = start + 1
                return self.encode(text[:cut], inside=inside) + self.encode(text[cut:], inside=True).moved(cut)
        return encoded

    def _plain(self, text: str) -> Encoded:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return Encoded(encoding.ids, encoding.offsets)

    def _inside(self, text: str) -> Encoded:
        behind = self._plain("\n" + text)
        count = len(self._newline)
        if behind.ids[:count] != self._newline:  # they are one token
            return self._plain(text)
        return Encoded(behind.ids[count:], behind.offsets[count:]).moved(-1)
