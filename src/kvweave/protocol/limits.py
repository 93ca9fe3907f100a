"""How large a request may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on one request; more is a typed error, never a truncation."""

    body_bytes: int = 16 * 2**20
    """Of the body, read by the server (413)."""
    header_bytes: int = 8 * 2**10
    """Of ``X-KV-Cache``."""
    messages: int = 4096
    parts: int = 4096
    """Content parts of all messages together; prompts of a completion request."""
    segments: int = 1024
    """Marked parts and documents."""
    edits: int = 65_536
    """Message ids to drop and repositions, together."""
    samples: int = 8
    min_ttl: float = 1.0
    """Seconds, of ttl and pin."""
    max_ttl: float = 30 * 86400.0
