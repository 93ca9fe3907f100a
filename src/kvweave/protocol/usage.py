"""The ``usage`` object: every prompt token in exactly one class, zeros included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvweave.core.report import ReuseReport

TOKEN_CLASSES = (
    *("cached_tokens", "prefilled_tokens", "recomputed_tokens", "fused_tokens", "repos_tokens", "drop_skipped_tokens"),
)
"""Fields of ``ReuseReport`` and of ``prompt_tokens_details`` that add up to the prompt."""
SUB_COUNTS = ("restored_tokens", "cache_write_tokens")


def usage_json(reports: Sequence[ReuseReport], completion_tokens: int, operations: int) -> dict[str, Any]:
    """Usage of a request. ``reports``: one for each prompt, whatever the number of its samples; they are added up.

    ``completion_tokens`` of all samples; ``operations``: cache operations that arrived.
    """
    details = {name: sum(getattr(report, name) for report in reports) for name in (*TOKEN_CLASSES, *SUB_COUNTS)}
    prompt_tokens = sum(report.prompt_tokens for report in reports)
    return {**counts_json(prompt_tokens, completion_tokens), "prompt_tokens_details": {**details, "cache_ops": operations}}


def counts_json(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Usage so far, in a chunk of a stream: the classes are known at its end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
