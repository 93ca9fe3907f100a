"""Identity of cached KV: what must agree before a record may be used (docs/architecture.md, "Keys")."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from blake3 import blake3

_TENANT_CONTEXT = "kvweave 2026 tenant key 1"
_TAG_CONTEXT = "kvweave 2026 tenant tag 1"


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


@dataclass(frozen=True, slots=True)
class Scope:
    """A tenant as the caches see it: ``tag`` [8 bytes] names it without telling who it is, ``key`` [32 bytes] keys hashes.

    The key changes with the tenant's epoch, so that nothing stored before an erasure can be found after it.
    """

    tag: bytes
    key: bytes
    epoch: int = 0

    @classmethod
    def of(cls, tenant: str, epoch: int = 0, secret: bytes = b"") -> Scope:
        """``secret`` is shared by all machines that share a store; without one, tags can be guessed from tenant names."""
        name = _field(secret) + _field(tenant.encode())
        return cls(
            tag=blake3(name, derive_key_context=_TAG_CONTEXT).digest(length=8),
            key=blake3(name + epoch.to_bytes(8, "little"), derive_key_context=_TENANT_CONTEXT).digest(),
            epoch=epoch,
        )

    def narrowed(self, salt: str) -> Scope:
        """A namespace inside the tenant: another key, the same tag, so that erasing the tenant covers it too."""
        return replace(self, key=blake3(salt.encode(), key=self.key).digest()) if salt else self


@dataclass(frozen=True, slots=True, order=True)
class ChunkKey:
    """Content address of one chunk's KV. Model and scope are parts of the type, so no path can forget them."""

    model: bytes
    """8 bytes of the model fingerprint's digest."""
    scope: bytes
    """Tag of the tenant."""
    content: bytes
    """128-bit hash of fingerprint, anchor ids and token ids, keyed with the tenant's key."""

    @property
    def name(self) -> str:
        """``model/scope/xx/content`` in hex: where a record lies in any store."""
        content = self.content.hex()
        return f"{self.model.hex()}/{self.scope.hex()}/{content[:2]}/{content}"


@dataclass(frozen=True)
class ChunkIdentity:
    """One chunk and all that decided its key; compared in full when a record is opened, so a collision is a miss."""

    key: ChunkKey
    token_ids: tuple[int, ...]
    anchor_ids: tuple[int, ...]
    """What stood in front when it was computed; its length is the position of the first token then."""
    fingerprint: ModelFingerprint
    epoch: int = field(default=0, compare=False)
    """The tenant's when the key was made: part of the key, and told to media so that they can refuse what came too late."""

    @classmethod
    def of(
        cls, token_ids: Sequence[int], anchor_ids: Sequence[int], fingerprint: ModelFingerprint, scope: Scope
    ) -> ChunkIdentity:
        key = chunk_key(token_ids, anchor_ids, fingerprint, scope)
        return cls(key, tuple(token_ids), tuple(anchor_ids), fingerprint, scope.epoch)


def chunk_key(token_ids: Sequence[int], anchor_ids: Sequence[int], fingerprint: ModelFingerprint, scope: Scope) -> ChunkKey:
    """Key of the KV of ``token_ids`` computed behind ``anchor_ids`` by one model for one tenant.

    Every field is length-prefixed, token ids are little-endian uint32, so no two different inputs share a byte string.
    The ids (not the text) are hashed: equal text under another normalisation is other KV.
    """
    hasher = blake3(key=scope.key)
    digest = fingerprint.digest
    ids = (np.asarray(x, dtype="<u4").tobytes() for x in (anchor_ids, token_ids))
    for value in (b"kvweave/chunk/2", digest, *ids):
        hasher.update(_field(value))
    return ChunkKey(digest[:8], scope.tag, hasher.digest(length=16))


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value
