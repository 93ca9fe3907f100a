"""What a store of chunk KV is. Stores hold bytes and CPU tensors; they know nothing of models, requests or positions.

Two layers. A ``Blobs`` is a medium that holds immutable byte strings under keys (a disk, Redis, S3): it knows nothing of
their content. A ``ChunkStore`` holds records: it checks what it reads and answers every lookup with a record or a ``Miss``.
Any doubt is a miss with a reason of the closed list ``MissReason``; misuse raises, I/O never does.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from blake3 import blake3
from torch import Tensor

from kvweave.core.keys import ChunkIdentity, ChunkKey, Scope
from kvweave.core.plan import LayerReader
from kvweave.errors import PinQuotaExceeded

LOG = logging.getLogger("kvweave.store")

MissReason = Literal[
    "absent",  # never stored here, as far as anyone knows
    "evicted",  # was here, made room for others
    "deleted",  # removed on request, or its tenant was erased
    "expired",  # outlived the time it was stored for
    "version",  # written in a format this version doesn't read
    "key",  # another record under this name
    "fingerprint",  # another model
    "tokens",  # other token or anchor ids
    "layout",  # shapes, dtype or codec don't fit, or the header makes no sense
    "checksum",  # bytes changed
    "short",  # bytes missing
    "deadline",  # too late to be of use
    "io",  # the medium failed
    "breaker",  # the medium failed so often that it isn't asked for a while
    "no_memory",  # no room for the bytes in memory
    "busy",  # the medium is locked by others
]
Reach = Literal["all", "memory"]
"""Which tiers a record may go to: any, or host memory alone."""
MISS_REASONS: tuple[str, ...] = get_args(MissReason)
DAMAGED: frozenset[MissReason] = frozenset({"key", "fingerprint", "tokens", "layout", "checksum", "short"})
"""Reasons that say a value is wrong for good: trying again won't help."""


class TierError(Exception):
    """A medium can't do what was asked, for a reason of the closed list. Never leaves ``kvweave.store``."""

    def __init__(self, reason: MissReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: MissReason = reason


class Rejected(Exception):
    """A write was refused without harm: ``reason`` is ``no_room``, ``quota``, ``read_only`` or ``stale`` (tenant erased)."""

    def __init__(self, reason: Literal["no_room", "quota", "read_only", "stale"]) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def contained(tier: str) -> Iterator[None]:
    """What a medium raises is a ``TierError``, ``Rejected`` or, for pins, ``PinQuotaExceeded``: neither a bug in one nor
    nonsense it got ends a request.
    """
    try:
        yield
    except (TierError, Rejected, PinQuotaExceeded):
        raise
    except MemoryError as error:
        raise TierError("no_memory") from error
    except Exception as error:
        LOG.exception("tier %s failed in a way it shouldn't", tier)
        raise TierError("io", repr(error)) from error


@dataclass(frozen=True)
class Miss:
    """Why a record couldn't be had, and from which tier that is known ("" if from all)."""

    reason: MissReason
    tier: str = ""


class StoredChunk(Protocol):
    """A record that was found and checked, wherever its bytes are; implements ``core.plan.KVSource``."""

    @property
    def identity(self) -> ChunkIdentity: ...

    @property
    def tier(self) -> str: ...

    def read(self, tokens: Tensor, first_layer: int, ticket: int, timeout: float) -> LayerReader: ...

    def close(self) -> None:
        """Nobody reads it any more."""
        ...


@dataclass(frozen=True)
class ChunkRecord:
    """The KV of one chunk in memory: unrotated keys, no position. Immutable.

    ``keys[l]`` and ``values[l]`` are [kv_heads, tokens, dim] on the CPU.
    """

    identity: ChunkIdentity
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    prefill_ms: float = 0.0
    """What computing it took: the time a hit may save."""
    expires: float = math.inf
    """Unix time from which on it isn't served any more."""
    tier: str = "host"

    @property
    def key(self) -> ChunkKey:
        return self.identity.key

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values)) + 4 * len(self.identity.token_ids)

    def read(self, tokens: Tensor, first_layer: int, ticket: int, timeout: float) -> LayerReader:
        return _MemoryReader(self, tokens)

    def close(self) -> None:
        """Memory is given back when nobody refers to it."""


class _MemoryReader:
    """Nothing to wait for."""

    tier = "host"
    bytes_read = 0
    load_seconds = 0.0
    jobs = 0

    def __init__(self, record: ChunkRecord, tokens: Tensor) -> None:
        self._record = record
        self._tokens = _as_slice(tokens)

    @property
    def arrived(self) -> bool:
        return True

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._record.keys[layer][:, self._tokens], self._record.values[layer][:, self._tokens]

    def close(self) -> None:
        """Nothing is held."""


def _as_slice(tokens: Tensor) -> slice | Tensor:
    """Ascending indices as a slice where they are contiguous: a view instead of a copy."""
    n, first = tokens.numel(), int(tokens[0])
    return slice(first, first + n) if int(tokens[-1]) - first == n - 1 else tokens


@dataclass(frozen=True)
class BlobInfo:
    """One stored value, as listed; times are Unix seconds, 0 where the medium can't tell."""

    key: ChunkKey
    size: int
    created: float = 0.0
    last_used: float = 0.0
    hits: int = 0
    pinned_until: float = 0.0


@dataclass(frozen=True)
class PutHints:
    """What a medium may use to decide what to keep. ``prefill_ms`` is the time one hit saves at most."""

    prefill_ms: float = 0.0
    tokens: int = 0
    epoch: int = 0
    """The tenant's epoch when the record was computed; a medium that knows a later one refuses the write as ``stale``."""
    expires: float = math.inf
    """Unix time from which on the medium may forget it."""


class Upper(Protocol):
    """Where records go that were read from a slower tier."""

    def admits(self, size: int) -> bool:
        """True if a record of so many bytes could be held at all."""
        ...

    def put(self, record: ChunkRecord) -> bool: ...


class Blob(Protocol):
    """One immutable value, open for reading: deleting or replacing it doesn't change what this object returns."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int, deadline: float) -> AbstractContextManager[memoryview]:
        """The bytes [offset, offset + length), valid as long as anything refers to them; fewer only where the value ends.

        ``deadline`` is in ``time.monotonic()`` seconds. Raises ``TierError``.
        """
        ...

    def close(self) -> None: ...


class Blobs(Protocol):
    """A medium. Thread-safe. Every method raises ``TierError`` when the medium fails; ``put`` also ``Rejected``."""

    @property
    def name(self) -> str:
        """Of the tier, in reports and metrics: disk, redis, s3."""
        ...

    @property
    def min_read(self) -> int:
        """Bytes below which a second read costs more than reading on: layers are fetched in groups of at least this."""
        ...

    def open(self, key: ChunkKey, deadline: float) -> Blob | None:
        """None: there is no such value."""
        ...

    def contains(self, key: ChunkKey, deadline: float) -> bool:
        """True if there is a value that hasn't expired; not a use, never waits longer than the deadline.

        A medium that can't tell cheaply whether one has expired says that it is there.
        """
        ...

    def was_evicted(self, key: ChunkKey) -> bool:
        """True if the value is known to have made room for others; from memory alone."""
        ...

    def put(self, key: ChunkKey, value: memoryview, hints: PutHints, deadline: float) -> None:
        """Store a value; it becomes visible whole or not at all. Storing what is there already is a success, and changes
        nothing unless that has expired.
        """
        ...

    def discard(self, key: ChunkKey, reason: MissReason) -> None:
        """A value proved to be damaged or alien: make sure it isn't served again. Missing is fine."""
        ...

    def delete(self, keys: Iterable[ChunkKey], deadline: float) -> int:
        """Remove values; returns how many there were. Missing is fine."""
        ...

    def scan(self, scope: bytes | None = None) -> Iterator[BlobInfo]:
        """All values, or those of one scope."""
        ...

    def erase(self, scope: bytes, deadline: float) -> tuple[int, int]:
        """Remove all values of a scope, whatever model they are of; returns how many, and their bytes."""
        ...

    def epoch(self, scope: bytes, deadline: float) -> int:
        """A number that is raised whenever this scope is erased."""
        ...

    def raise_epoch(self, scope: bytes, epoch: int, deadline: float) -> None:
        """Durably set the epoch to at least ``epoch``; every process that uses the medium sees it within a second."""
        ...

    def ping(self, deadline: float) -> None:
        """Whether the medium can be used: raises ``TierError`` if not."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Pinning(Protocol):
    """A medium that evicts by rules of its own, from which a value can be kept. Methods raise ``TierError``."""

    def pin(self, key: ChunkKey, until: float, owner: str) -> bool:
        """Keep a value until a Unix time; False if there is none. Raises ``PinQuotaExceeded``."""
        ...

    def unpin(self, key: ChunkKey) -> bool:
        """True if it was pinned."""
        ...


@dataclass(frozen=True)
class TierReceipt:
    """What was removed from one tier. ``state``: deleted, or unreachable (its bytes can't be found, but still lie there)."""

    records: int
    bytes: int
    state: Literal["deleted", "unreachable"]
    error: str | None = None


@dataclass(frozen=True)
class EraseReceipt:
    """``pending`` names tiers whose bytes are still to be removed; that is tried again until it worked."""

    receipt_id: str
    scope: str
    erased_at: float
    epoch: int
    tiers: dict[str, TierReceipt]
    pending: tuple[str, ...]

    @property
    def digest(self) -> str:
        """BLAKE3 over all other fields, so that a stored receipt can be checked."""
        return blake3(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "digest": self.digest}


@dataclass(frozen=True)
class StoreStats:
    """Counters since the store was opened; ``bytes`` and ``records`` are what it holds now."""

    records: int
    bytes: int
    budget: int
    hits: int
    misses: int
    evictions: int
    refused: int
    """Records that were not stored: larger than the whole budget, or than what pins left of it."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Misses by reason."""
    pins: int = 0
    pinned_bytes: int = 0


class ChunkStore(Protocol):
    """One tier, or several composed into one. Thread-safe."""

    @property
    def io_threads(self) -> int:
        """Threads that read for requests."""
        ...

    @property
    def immediate(self) -> bool:
        """True if ``find`` never waits for I/O, so that it may be called where a request would have to wait."""
        ...

    def find(self, wanted: Sequence[ChunkIdentity]) -> list[StoredChunk | Miss]:
        """Each on its own: a miss never hides a later hit. What is found was checked against its identity."""
        ...

    def put(self, record: ChunkRecord, *, wait: bool = False, expires: float | None = None, tiers: Reach = "all") -> bool:
        """Store a record; False if no tier can hold it. ``wait``: for room in the queue to slower tiers. ``expires``: the
        Unix time from which on no tier serves it; a tier that holds it already keeps it for as long as it said then.
        """
        ...

    def wait_for_room(self) -> None:
        """Until slower tiers have caught up: to be called, without locks, by who is about to store much."""
        ...

    def contains(self, identity: ChunkIdentity) -> bool:
        """True if a tier holds the record; neither counted nor a use."""
        ...

    def keep(self, identity: ChunkIdentity, *, wait: bool = False, tiers: Reach = "all") -> bool:
        """True if a tier holds the record; slower tiers that lack it then get a copy, if ``tiers`` has them."""
        ...

    def pin(self, keys: Iterable[ChunkKey], until: float) -> set[ChunkKey]:
        """Keep records from eviction until a Unix time, in every tier that evicts by rules of its own; returns those that
        are pinned in one or more. Records still on their way to a slower tier aren't pinned there. A pin outlives no
        expiry. Raises ``PinQuotaExceeded`` if one of them could be pinned nowhere for want of room for pins.
        """
        ...

    def unpin(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those that were pinned."""
        ...

    def pinned_bytes(self, scope: bytes | None = None) -> int:
        """What pins hold in host memory: of one scope, or of all."""
        ...

    def scope(self, tenant: str) -> Scope:
        """The tenant's current scope. Never waits longer than a look at the slowest tier that answers."""
        ...

    def current(self, scope: Scope) -> bool:
        """False if the tenant is known to have been erased since; from memory alone."""
        ...

    def remove(self, keys: Iterable[ChunkKey]) -> int:
        """Remove records; returns how many there were."""
        ...

    def erase(self, tenant: str) -> EraseReceipt:
        """Make everything a tenant stored unreachable in every tier and process, then remove it."""
        ...

    def stats(self) -> StoreStats: ...

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all queued writes are done; False if ``timeout`` (seconds) passed first."""
        ...

    def close(self) -> None: ...
