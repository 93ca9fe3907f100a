# ruff: noqa: E501
"""Answers as models write them."""

from __future__ import annotations

from typing import Any

FIND = ("find", {"q": "a b", "n": 3})
HERE = ("here", {})
ARGUMENTS = '{"q": "a b", "n": 3}'
OBJECT = f'{{"name": "find", "arguments": {ARGUMENTS}}}'
EMPTY = '{"name": "here", "arguments": {}}'

# Parser, an answer, its content, its calls.
ANSWERS: list[tuple[str, str, str | None, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", None, [FIND]),
    ("hermes", f"Let me see.\n<tool_call>{OBJECT}</tool_call>\n<tool_call>{EMPTY}</tool_call>", "Let me see.", [FIND, HERE]),
    ("hermes", f"<tool_call>\n{OBJECT}\n{EMPTY}\n</tool_call> Done.", " Done.", [FIND, HERE]),
    ("hermes", f"<tool_call>{OBJECT}", None, [FIND]),
    (
        "hermes",
        '<tool_call>{"name": "w", "arguments": {"s": "</tool_call>"}}</tool_call>',
        None,
        [("w", {"s": "</tool_call>"})],
    ),
    ("hermes", '<tool_call>{"name": "w", "arguments": {"s": "a\nb"}}</tool_call>', None, [("w", {"s": "a\nb"})]),
    ("hermes", '<tool_call>{"name": "here"}</tool_call>', None, [HERE]),
    ("hermes", '<tool_call>{"name": "here", "arguments": "{}"}</tool_call>', None, [HERE]),
    ("granite", f"<|tool_call|>[{OBJECT}, {EMPTY}]", None, [FIND, HERE]),
    ("granite", f"<tool_call>[{OBJECT}]", None, [FIND]),
    ("phi4_mini_json", f"<|tool_call|>[{OBJECT}]<|/tool_call|>", None, [FIND]),
    ("phi4_mini_json", f"functools[{OBJECT}]", None, [FIND]),
    ("nemotron_json", f"Hm.\n<TOOLCALL>[{OBJECT}]</TOOLCALL>", "Hm.", [FIND]),
    (
        "cohere",
        f'<|START_ACTION|>[\n  {{"tool_call_id": "0", "tool_name": "find", "parameters": {ARGUMENTS}}}\n]<|END_ACTION|>',
        None,
        [FIND],
    ),
    ("cohere", "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hello.", []),
    ("llama3_json", f'{{"name": "find", "parameters": {ARGUMENTS}}}', None, [FIND]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "find", "parameters": {ARGUMENTS}}}; {{"name": "here", "parameters": {{}}}}',
        None,
        [FIND, HERE],
    ),
    ("llama3_json", f'{{"type": "function", "function": {{"name": "find", "parameters": {ARGUMENTS}}}}}', None, [FIND]),
    ("mistral", f"[TOOL_CALLS][{OBJECT}, {EMPTY}]", None, [FIND, HERE]),
    (
        "mistral",
        f"Well. [TOOL_CALLS]find[CALL_ID]abcdefgh1[ARGS]{ARGUMENTS}[TOOL_CALLS]here[ARGS]{{}}",
        "Well.",
        [FIND, HERE],
    ),
    ("mistral", f"[TOOL_CALLS]find{ARGUMENTS}", None, [FIND]),
    ("functionary", f"<function=find>{ARGUMENTS}</function><function=here>{{}}</function>", None, [FIND, HERE]),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>here\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
        [FIND, HERE],
    ),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        None,
        [FIND],
    ),
    (
        "deepseek_v32",
        'Yes.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="q" string="true">a b</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="here">\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Yes.",
        [FIND, HERE],
    ),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
        "<|tool_call_begin|>here:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        None,
        [FIND, HERE],
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary to=functions.find "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        None,
        [FIND],
    ),
    ("openai", f"to=functions.find<|channel|>commentary json<|message|>{ARGUMENTS}", None, [FIND]),
    (
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi you.<|return|>",
        "Hi you.",
        [],
    ),
    ("pythonic", '[find(q="a b", n=3), here()]', None, [FIND, HERE]),
    ("pythonic", "<|tool_call_start|>[find(q='a b', n=3)]<|tool_call_end|> Wait.", " Wait.", [FIND]),
    (
        "pythonic",
        "[f.g(a=[1, -2.5, (True, None)], b={'k': \"it\\'s\", 'l': '''x\ny'''}, c='\\u00e9\\q')]",
        None,
        [("f.g", {"a": [1, -2.5, [True, None]], "b": {"k": "it's", "l": "x\ny"}, "c": "é\\q"})],
    ),
    ("gemma4", '<|tool_call>call:find{n:3,q:<|"|>a b<|"|>}<tool_call|>', None, [("find", {"n": 3, "q": "a b"})]),
    (
        "gemma4",
        '<|tool_call>call:f{o:{k:[<|"|>{"a"}<|"|>,true]}}<tool_call|><|tool_call>call:here{}<tool_call|><|tool_response>',
        None,
        [("f", {"o": {"k": ['{"a"}', True]}}), HERE],
    ),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=find>\n<parameter=q>\na b\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [FIND],
    ),
    (
        "qwen3_coder",
        "<function=write>\n<parameter=text>\nif a </parameter> b:\n\tpass\n\n</parameter>\n</function><function=here>\n</function>",
        None,
        [("write", {"text": "if a </parameter> b:\n\tpass\n"}), HERE],
    ),
    (
        "glm45",
        "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>a b</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        None,
        [FIND],
    ),
    ("glm45", "<tool_call>here\n</tool_call>", None, [HERE]),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="find">\n<parameter name="q">a b</parameter>\n<parameter name="n">3</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        None,
        [FIND],
    ),
]

# What looks like a call and isn't one: it stays, to the letter.
NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "Hello, world.\n"),
    ("hermes", "Say <tool_call> and </tool_call>."),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"q": tru}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"q": "a</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", "<tool_call>" + "[" * 5000),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}</tool_call>"),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", "{ is an opening brace, } a closing one"),
    ("llama3_json", f"The call is {OBJECT}"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] is a mark"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
    ("pythonic", "[1] A footnote."),
    ("pythonic", "[see](https://example.org)"),
    ("pythonic", "[find(q)]"),
    ("pythonic", "[find(n=1e999)]"),
    ("pythonic", "[find(q=" + "[" * 200 + "]" * 200 + ")]"),
    ("pythonic", "[]"),
    ("pythonic", '[find(q="\\U0011ffff")]'),
    ("pythonic", '[find(q="a'),
    ("gemma4", "<|tool_call>call:find{q:}<tool_call|>"),
    ("qwen3_coder", "Use <tool_call> or <function=f>, as you like. " + "x" * 300),
    ("qwen3_coder", "<tool_call>\n<function=f>\nhello\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ("glm45", "<tool_call>a b c</tool_call>"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{oops}\n```<｜tool▁call▁end｜>"),
    ("openai", "to=5 is odd"),
]
