"""Identity of cached KV: what must agree before a record may be used (docs/architecture.md, "Keys")."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

ChunkKey = bytes
"""128-bit content address of a chunk's KV."""


@dataclass(frozen=True)
class ModelFingerprint:
    """Everything about a loaded model that changes the numbers in its KV.

    ``parts`` maps a name (weights, tokenizer, rope, dtype, ...) to its digest or value; ``digest`` is the BLAKE3 of all
    of them. Two fingerprints are equal exactly if every part is.
    """

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, **parts: str) -> ModelFingerprint:
        return cls(tuple(sorted(parts.items())))

    @property
    def digest(self) -> bytes:
        return blake3(json.dumps(self.parts).encode()).digest(length=16)

    @property
    def short(self) -> str:
        return self.digest.hex()[:12]


def chunk_key(token_ids: Sequence[int], anchor_ids: Sequence[int], fingerprint: ModelFingerprint, tenant: str) -> ChunkKey:
    """Key of the KV of ``token_ids`` computed behind ``anchor_ids`` by one model for one tenant.

    Every field is length-prefixed, token ids are little-endian uint32, so no two different inputs share a byte string.
    The ids (not the text) are hashed: equal text under another normalisation is other KV.
    """
    hasher = blake3()
    ids = (np.asarray(x, dtype="<u4").tobytes() for x in (anchor_ids, token_ids))
    for field in (b"kvweave/chunk/1", tenant.encode(), fingerprint.digest, *ids):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest(length=16)
