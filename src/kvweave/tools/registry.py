"""Tool call parsers by name, and which one a model needs."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping

from kvweave.errors import UnknownOption
from kvweave.tools.base import ToolParser
from kvweave.tools.harmony import Harmony
from kvweave.tools.json_calls import MarkedJson, Mistral, NamedJson
from kvweave.tools.literals import Gemma, Pythonic
from kvweave.tools.xml_calls import DEEPSEEK_DSML, GLM, MINIMAX, QWEN_CODER


def _nine_characters() -> str:
    """An id as Mistral's templates want it."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


_DEEPSEEK = NamedJson(
    "<｜tool▁call▁begin｜>",
    re.compile(r"(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)(?:<｜tool▁sep｜>)?\s*(?:```json\s*)?"),
    closings=("```", "<｜tool▁call▁end｜>"),
    hidden=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
_KIMI = NamedJson(
    "<|tool_call_begin|>",
    re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"),
    closings=("<|tool_call_end|>",),
    hidden=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
_COHERE = MarkedJson(
    ("<|START_ACTION|>",),
    ("<|END_ACTION|>",),
    hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
_FUNCTIONARY = NamedJson("<function=", re.compile(r"(?P<name>[^>\s]+)>\s*"), closings=("</function>",))

TOOL_PARSERS: Mapping[str, ToolParser] = {
    parser.name: parser
    for parser in (
        ToolParser("cohere", _COHERE),
        ToolParser("deepseek_v3", _DEEPSEEK),
        ToolParser("deepseek_v32", DEEPSEEK_DSML),
        ToolParser("functionary", _FUNCTIONARY, needs_special_tokens=False),
        ToolParser("gemma4", Gemma()),
        ToolParser("glm45", GLM),
        ToolParser("granite", MarkedJson(("<|tool_call|>", "<tool_call>"), ("</tool_call>",))),
        ToolParser("hermes", MarkedJson(("<tool_call>",), ("</tool_call>",))),
        ToolParser("kimi_k2", _KIMI),
        ToolParser("llama3_json", MarkedJson(("<|python_tag|>",), starts=("{",), separator=";")),
        ToolParser("minimax_m2", MINIMAX),
        ToolParser("mistral", Mistral(), new_id=_nine_characters),
        ToolParser("nemotron_json", MarkedJson(("<TOOLCALL>",), ("</TOOLCALL>",)), needs_special_tokens=False),
        ToolParser("openai", Harmony()),
        ToolParser("phi4_mini_json", MarkedJson(("<|tool_call|>", "functools"), ("<|/tool_call|>",))),
        ToolParser("pythonic", Pythonic()),
        ToolParser("qwen3_coder", QWEN_CODER),
    )
}

# What only templates of that format write, the most telling first.
_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>commentary", "openai"),
    ("[TOOL_CALLS]", "mistral"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<|tool_call>call:", "gemma4"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<TOOLCALL>", "nemotron_json"),
    ("<|tool_call_start|>", "pythonic"),
    ("<|START_ACTION|>", "cohere"),
    ("<|/tool_call|>", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<function=", "functionary"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)
_FAMILIES = {
    "gemma3": "pythonic",
    "gemma3_text": "pythonic",
    "gpt_oss": "openai",
    "lfm2": "pythonic",
    "llama4": "pythonic",
    "llama4_text": "pythonic",
    "mistral": "mistral",
    "qwen2": "hermes",
    "qwen3": "hermes",
}


def get_parser(name: str) -> ToolParser:
    """Raises ``UnknownOption`` with a suggestion."""
    if name not in TOOL_PARSERS:
        raise UnknownOption(name, TOOL_PARSERS, "--tool-parser")
    return TOOL_PARSERS[name]


def pick_parser(template_text: str, family: str | None = None) -> str | None:
    """The parser for a model: by what its chat template writes, else by its ``model_type``; None if neither tells."""
    by_template = next((name for sign, name in _SIGNS if sign in template_text), None)
    return by_template or (_FAMILIES.get(family) if family else None)
