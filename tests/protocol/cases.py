"""Bodies and strategies that several tests use."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63) - 1, 10**400, 0, -1])
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["\ud800", "1", "1.0", "01", "5m", "99999999999d", "text", "fused", "{path}", "doc:1", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=6), inner, max_size=3),
    max_leaves=8,
)
"""Any value a JSON parser may hand out, and some that only careless ones do: NaN, halves of surrogate pairs."""


def chat_body() -> dict[str, Any]:
    """Valid, with most fields there are."""
    mark = {"segment": "doc:a", "kind": "document", "pin": "1h"}
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "A document.", "cache": mark},
                    {"type": "text", "text": "Another.", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
                    {"type": "text", "text": "A question?", "prompt_cache_breakpoint": {"ttl": 60}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
        ],
        "documents": [{"doc_id": "b", "title": "T", "text": "More text.", "cache": {"pin": 30}}],
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "logit_bias": {"5": 1.5},
        "stop": ["\n"],
        "seed": 1,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "cache": {
            "drop": {},
            "reposition": [],
            "reuse": "fused",
            "technique": "cacheblend",
            "recompute_ratio": 0.2,
            "max_divergence": 0.05,
            "fallback": "refuse",
            "ttl": "1d",
            "store": "memory",
            "explain": True,
        },
        "cache_salt": "s",
        "prompt_cache_key": "k",
        "context_management": {"edits": []},
        "user": "u",
    }


def completion_body() -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": [[1, 2, 3], [4, 5]],
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
        "cache": {"reuse": "exact", "ttl": 60, "timings": True},
        "prompt_cache_options": {"ttl": "30m", "mode": "explicit"},
    }


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from places(child, (*path, key))


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of ``body`` with another value at ``path``."""
    body = copy.deepcopy(body)
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return body
