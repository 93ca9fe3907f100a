"""From a configuration to a store."""

from __future__ import annotations

import importlib.metadata
from contextlib import ExitStack
from pathlib import Path

from blake3 import blake3

from kvweave.config import Tiers, parse_size
from kvweave.core.spec import KVLayout
from kvweave.errors import InvalidOption
from kvweave.store.base import Blobs
from kvweave.store.codec import check_codec
from kvweave.store.guard import Guarded
from kvweave.store.host import HostStore
from kvweave.store.tiered import TieredStore, TierOptions


def open_store(host_bytes: int, tiers: Tiers, layout: KVLayout, home: Path) -> TieredStore:
    """Host memory, then disk, then the remotes in order. A tier that can't start is an error here, not a slow miss later.

    ``home``: folder of this host for what must outlive the process.
    """
    quota = None if tiers.tenant_quota is None else parse_size(tiers.tenant_quota, "tenant_quota")
    with ExitStack() as opened:  # what was opened before a tier fails is closed again
        media: list[Blobs] = []
        notes: dict[str, Path] = {}

        def add(medium: Blobs, address: str) -> None:
            opened.callback(medium.close)
            media.append(medium)
            notes[medium.name] = home / "erasures" / blake3(address.encode()).hexdigest(length=8)

        if tiers.disk is not None:
            add(_open_disk(tiers, quota), f"disk {tiers.disk_folder()[0].absolute()}")
        for url in tiers.remotes:
            from kvweave.store.remote import address, open_remote

            add(open_remote(url), address(url))
        if len({medium.name for medium in media}) < len(media):
            names = ", ".join(medium.name for medium in media)
            raise InvalidOption(f"The tiers are {names}: two of one kind can't be told apart. Give one of each.")
        options = _options(tiers, notes)
        store = TieredStore(HostStore(host_bytes, tenant_quota=quota), media, layout=layout, options=options)
        opened.pop_all()
        return store


def _options(tiers: Tiers, notes: dict[str, Path]) -> TierOptions:
    return TierOptions(
        codec=check_codec(tiers.codec),
        threads=tiers.threads,
        staging=parse_size(tiers.staging, "staging"),
        write_queue=parse_size(tiers.write_queue, "write_queue"),
        lookup_timeout=tiers.lookup_timeout,
        load_timeout=tiers.load_timeout,
        secret=_secret(tiers),
        writer=f"kvweave {importlib.metadata.version('kvweave')}",
        notes=notes,
    )


def _open_disk(tiers: Tiers, quota: int | None) -> Blobs:
    """A disk that fails again and again is left alone for a while; trying a call again is the file system's business."""
    from kvweave.store.disk import DiskBlobs
    from kvweave.store.eviction import Quota

    folder, capacity = tiers.disk_folder()
    disk = DiskBlobs(
        folder,
        capacity,
        policy=tiers.eviction,
        default_quota=Quota(max=quota),
        direct=tiers.direct,  # type: ignore[arg-type]
        durability=tiers.durability,  # type: ignore[arg-type]
    )
    return Guarded(disk, attempts=1)


def _secret(tiers: Tiers) -> bytes:
    if tiers.secret_file is None:
        return b""
    try:
        secret = tiers.secret_file.read_bytes()
    except OSError as error:
        raise InvalidOption(f"secret_file '{tiers.secret_file}' can't be read: {error.strerror}. Check its path.") from error
    if len(secret) < 16:
        raise InvalidOption(f"secret_file '{tiers.secret_file}' has {len(secret)} bytes. Use 16 random bytes or more.")
    return secret
