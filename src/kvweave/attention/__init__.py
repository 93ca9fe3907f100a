"""Attention backends: one primitive, several kernels."""

from __future__ import annotations

from kvweave.attention.base import AttentionBackend, LayerOptions, ViewRows
from kvweave.attention.blocked import BlockedAttention
from kvweave.attention.reference import ReferenceAttention
from kvweave.attention.sdpa import SdpaAttention
from kvweave.errors import InvalidOption, suggest

BACKENDS: dict[str, type[AttentionBackend]] = {
    "reference": ReferenceAttention,
    "blocked": BlockedAttention,
    "sdpa": SdpaAttention,
}


def make_backend(name: str) -> AttentionBackend:
    """Backend by name; raises ``InvalidOption`` for an unknown one."""
    if name not in BACKENDS:
        raise InvalidOption(f"Attention backend '{name}' is unknown. {suggest(name, BACKENDS)}")
    return BACKENDS[name]()


__all__ = ["BACKENDS", "AttentionBackend", "LayerOptions", "ViewRows", "make_backend"]
