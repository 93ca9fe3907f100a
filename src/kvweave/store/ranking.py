"""In which order a record's rows are stored: by importance, so that what is recomputed lies together at one end.

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
        """[n] tokens by importance, ascending or descending."""
        ...


class TextOrder:
    """As in the text. Under the rule that a chunk's first tokens matter most (EPIC, arXiv:2410.15332) what is recomputed
    lies at the start, and the rest is contiguous. Rows in text order are also handed out without another copy.
    """

    name: ClassVar[str] = "text/1"

    def order(self, record: ChunkRecord) -> NDArray[np.int64]:
        return np.arange(len(record.identity.token_ids))
