"""gpt-oss's format: an answer is a series of messages on channels; a call is one with a recipient."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvweave.tools.base import Block, Call, Tools
from kvweave.tools.json_calls import NotACall, dump, read_value

_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NEXT = re.compile("|".join(map(re.escape, (*_ENDS, "<|start|>"))))
_LONGEST_HEADER = 256


@dataclass(frozen=True)
class Harmony:
    """Messages for the user are content, those on the channel ``analysis`` are reasoning and left out."""

    openings: tuple[str, ...] = ("<|start|>", "<|channel|>", *_ENDS)
    starts: tuple[str, ...] = ("to=",)

    def read(self, text: str, final: bool, tools: Tools) -> Block | None:
        for mark in _ENDS:
            if text.startswith(mark):
                return Block(len(mark))
        begin = text.find(_MESSAGE, 0, _LONGEST_HEADER)
        if begin < 0:
            return None if len(text) < _LONGEST_HEADER else Block(1, content=text[0])
        header, body = text[:begin], begin + len(_MESSAGE)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is not None:
            return self._call(text, body, recipient[1], final)
        if channel is None or channel[1] != "analysis":
            return Block(body)  # what follows is content, and streams
        end = _NEXT.search(text, body)
        if end is None:
            return Block(len(text)) if final else None
        return Block(end.end() if end[0] in _ENDS else end.start())

    def _call(self, text: str, body: int, name: str, final: bool) -> Block | None:
        try:
            found = read_value(text, body, _ENDS[1])
            if found is None:
                return Block(body) if final else None
            if not isinstance(found[0], dict):
                raise NotACall
            return Block(found[1], (Call(name, dump(found[0])),))
        except NotACall:
            return Block(body)  # its header is gone, but not what it says
