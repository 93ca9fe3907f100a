"""kvweave: serve decoder LLMs and reuse KV cache wherever text repeats.

Importing this module loads nothing heavy, probes nothing and reads no environment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "kvweave.llm",
    "Precomputed": "kvweave.llm",
    "Document": "kvweave.core.prompt",
    "Prompt": "kvweave.core.prompt",
    "SamplingParams": "kvweave.core.sampling",
    "Output": "kvweave.core.report",
    "Delta": "kvweave.core.report",
    "ReuseReport": "kvweave.core.report",
    "EngineConfig": "kvweave.config",
    "Tiers": "kvweave.config",
    "KvweaveError": "kvweave.errors",
    "techniques": "kvweave.reuse.registry",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from kvweave.config import EngineConfig, Tiers
    from kvweave.core.prompt import Document, Prompt
    from kvweave.core.report import Delta, Output, ReuseReport
    from kvweave.core.sampling import SamplingParams
    from kvweave.errors import KvweaveError
    from kvweave.llm import LLM, Precomputed
    from kvweave.reuse.registry import techniques


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvweave' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
