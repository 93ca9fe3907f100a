"""Tool calls in answers: one parser for each way models write them, for whole answers and streams."""

from kvweave.tools.base import (
    ContentDelta,
    ParsedAnswer,
    StreamingToolParser,
    ToolCall,
    ToolCallDelta,
    ToolParser,
)
from kvweave.tools.registry import TOOL_PARSERS, get_parser, pick_parser

__all__ = [
    "TOOL_PARSERS",
    "ContentDelta",
    "ParsedAnswer",
    "StreamingToolParser",
    "ToolCall",
    "ToolCallDelta",
    "ToolParser",
    "get_parser",
    "pick_parser",
]
