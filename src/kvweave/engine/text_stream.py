"""Text of an answer while it grows: characters held back until complete, text behind a stop string never shown."""

from __future__ import annotations

from typing import Protocol


class TextDecoder(Protocol):
    """Turns a growing list of ids into text, piece by piece."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Hands out text that is certain, up to the stop string that is complete first (of two, the longer one).

    The result doesn't depend on how the text is cut into tokens. ``include_stop`` leaves the stop string in the text; one
    that is complete within the first ``min_tokens`` tokens stops nothing.
    """

    def __init__(
        self, decoder: TextDecoder, stop: tuple[str, ...] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._decoder = decoder
        self._stop = stop
        self._include_stop = include_stop
        self._ignored = min_tokens  # tokens that still come before a stop string counts
        self._held = ""
        self._shown: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was handed out."""
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can be shown now."""
        shown = self._accept(self._decoder.push(token_id))
        self._ignored -= 1
        return shown

    def flush(self) -> str:
        """The answer is over: what was held back is text after all."""
        if self.stopped:
            return ""
        shown = self._accept(self._decoder.flush())
        if self._held:
            self._shown.append(self._held)
            shown, self._held = shown + self._held, ""
        return shown

    def _accept(self, new: str) -> str:
        pending, old = self._held + new, len(self._held)
        ends = self._ends(pending, old) if self._ignored <= 0 else []
        if ends:
            end, start = min(ends)
            self.stopped = True
            cut, self._held = (end if self._include_stop else start), ""
        else:
            cut = len(pending) - max((_overlap(pending, s) for s in self._stop), default=0)
            self._held = pending[cut:]
        self._shown.append(pending[:cut])
        return pending[:cut]

    def _ends(self, text: str, old: int) -> list[tuple[int, int]]:
        """End and start of the stop strings that are complete in ``text``, but weren't in its first ``old`` characters."""
        found = ((text.find(s, max(0, old - len(s) + 1)), len(s)) for s in self._stop)
        return [(start + length, start) for start, length in found if start >= 0]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
