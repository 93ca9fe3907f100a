"""Text of an answer while it grows: characters held back until complete, stop strings never shown."""

from __future__ import annotations

from typing import Protocol


class TextDecoder(Protocol):
    """Turns a growing list of ids into text, piece by piece."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """``text`` is what has been handed out so far; it ends in front of the first stop string."""

    def __init__(self, decoder: TextDecoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can be shown now."""
        return self._accept(self._decoder.push(token_id))

    def flush(self) -> str:
        """The answer is over: what was held back is text after all."""
        if self.stopped:
            return ""
        shown = self._accept(self._decoder.flush()) + ("" if self.stopped else self._held)
        if not self.stopped:
            self.text += self._held
        self._held = ""
        return shown

    def _accept(self, new: str) -> str:
        pending = self._held + new
        ends = [at for s in self._stop if (at := pending.find(s)) >= 0]
        if ends:
            self.stopped = True
            shown, self._held = pending[: min(ends)], ""
        else:
            keep = max((_overlap(pending, s) for s in self._stop), default=0)
            cut = len(pending) - keep
            shown, self._held = pending[:cut], pending[cut:]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
