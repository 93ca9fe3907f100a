"""In which order a record's rows are stored: ascending importance, so that what is recomputed lies at the end.

A ranking is layout, not identity: it isn't part of the key, and a technique that recomputes other rows still gets the right
numbers, only from more bytes.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.store.base import ChunkRecord


class Ranking(Protocol):
    """``name`` is stored in the record's header; it ends with the version of the rule."""

    @property
    def name(self) -> str: ...

    def order(self, record: ChunkRecord) -> NDArray[np.int64]:
        """[n] tokens, the least important first."""
        ...


class HeadsLast:
    """The first tokens of a chunk matter most (EPIC, arXiv:2410.15332): tokens from the last to the first."""

    name: ClassVar[str] = "heads/1"

    def order(self, record: ChunkRecord) -> NDArray[np.int64]:
        return np.arange(len(record.identity.token_ids))[::-1]


class TokenOrder:
    """As in the text."""

    name: ClassVar[str] = "token/1"

    def order(self, record: ChunkRecord) -> NDArray[np.int64]:
        return np.arange(len(record.identity.token_ids))
