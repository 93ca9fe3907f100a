"""``kvweave cache verify``, ``pin``, ``unpin``, ``rm``, ``erase``, ``export``, ``import``. All return exit codes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvweave.cli.cache_show import DAMAGED
from kvweave.cli.output import LOG, Progress, print_json, print_table
from kvweave.cli.units import show_bytes, show_count, show_span
from kvweave.cli.writing import show_reasons
from kvweave.errors import StoreError
from kvweave.store.admin import StoreFolder
from kvweave.store.archive import export_records, import_records
from kvweave.store.base import BlobInfo
from kvweave.store.selection import Selection, parse_age, tag_of

_LISTED = 20  # of what a dry run would remove


def verify_records(root: Path, selection: Selection, *, full: bool, repair: bool, as_json: bool) -> int:
    with StoreFolder(root) as folder:
        infos = folder.select(selection)
        with Progress().bar("Checking records", total=len(infos)) as step:
            result = folder.verify(infos, full=full, repair=repair, step=step)
    if as_json:
        damaged = [{"key": d.key.content.hex(), "reason": d.reason, "detail": d.detail} for d in result.damaged]
        print_json({"store": str(root), "full": full, **dataclasses.asdict(result), "damaged": damaged})
    else:
        what = f"all bytes ({show_bytes(result.bytes)})" if full else "headers"
        count = show_count(result.checked, "record")
        print(f"{count}, {what} checked in {result.seconds:.1f} s: {len(result.damaged)} damaged")
        if result.damaged:
            print_table(
                "Damaged", ("key", "reason", "detail"), [(d.key.content.hex(), d.reason, d.detail) for d in result.damaged]
            )
            told = f"{result.repaired} were taken away." if repair else "Engines don't serve them; --repair takes them away."
            print(told)
    return DAMAGED if result.damaged else 0


def pin_records(root: Path, selection: Selection, *, span: str, owner: str, as_json: bool) -> int:
    seconds = parse_age(span)
    with StoreFolder(root) as folder:
        infos = folder.select(selection)
        count = folder.pin(infos, seconds, owner)
    size = sum(info.size for info in infos)
    return _told(
        as_json,
        {"store": str(root), "pinned": count, "bytes": size, "until": time.time() + seconds},
        f"{show_count(count, 'record')} ({show_bytes(size)}) pinned for {show_span(seconds)}.",
    )


def unpin_records(root: Path, selection: Selection, *, as_json: bool) -> int:
    with StoreFolder(root) as folder:
        count = folder.unpin(folder.select(selection))
    return _told(as_json, {"store": str(root), "unpinned": count}, f"{show_count(count, 'record')} unpinned.")


def remove_records(root: Path, selection: Selection, *, pinned: bool, yes: bool, as_json: bool) -> int:
    now = time.time()
    with StoreFolder(root) as folder:
        chosen = folder.select(selection)
        going = [info for info in chosen if pinned or info.pinned_until <= now]
        removed = folder.remove(going) if yes else 0
    size = sum(info.size for info in going)
    kept = len(chosen) - len(going)
    document = {"store": str(root), "dry_run": not yes, "chosen": len(going), "bytes": size, "removed": removed}
    document |= {"pinned_kept": kept, "keys": [info.key.content.hex() for info in going]}
    if yes:
        LOG.info("cache rm: %d records of %s removed", removed, root)
        text = f"{show_count(removed, 'record')} ({show_bytes(size)}) removed."
    else:
        text = f"{show_count(len(going), 'record')} ({show_bytes(size)}) would be removed. Do it with --yes."
        if not as_json:
            _list(going)
    return _told(as_json, document, text + (f" Kept: {show_count(kept, 'pinned record')}." if kept else ""))


def _list(infos: Sequence[BlobInfo]) -> None:
    for info in infos[:_LISTED]:
        print(f"  {info.key.content.hex()}  {show_bytes(info.size)}")
    if len(infos) > _LISTED:
        print(f"  ... and {len(infos) - _LISTED} more")


def erase_tenant(root: Path, tenant: str, secret: bytes, *, force: bool, yes: bool, as_json: bool) -> int:
    tag = tag_of(tenant, secret)
    with StoreFolder(root) as folder:
        infos = folder.select(Selection(scope=tag))
        if not (infos or force or folder.epoch(bytes.fromhex(tag))):
            raise StoreError(
                f"Nothing of tenant '{tenant}' was ever stored in {root}. Check the name and --secret-file; --force goes on."
            )
        size = sum(info.size for info in infos)
        if not yes:
            return _told(
                as_json,
                {"store": str(root), "dry_run": True, "scope": tag, "records": len(infos), "bytes": size},
                f"{show_count(len(infos), 'record')} ({show_bytes(size)}) of '{tenant}' would be erased. Do it with --yes.",
            )
        receipt = folder.erase(tenant, secret)
    done = receipt.tiers["disk"]
    LOG.info("cache erase: receipt %s, %d records", receipt.receipt_id, done.records)
    text = (
        f"{show_count(done.records, 'record')} ({show_bytes(done.bytes)}) of '{tenant}' erased.\n"
        f"Receipt {receipt.receipt_id}: tag {receipt.scope}, epoch {receipt.epoch}, digest {receipt.digest}"
    )
    if receipt.pending:
        text = f"The records are unreachable, but their bytes are still there ({done.error}). Run it again.\n{text}"
    _told(as_json, {"store": str(root), "dry_run": False, **receipt.to_json()}, text)
    return 1 if receipt.pending else 0


def export_archive(root: Path, selection: Selection, archive: Path, *, force: bool, as_json: bool) -> int:
    with StoreFolder(root) as folder:
        infos = folder.select(selection)
        with Progress().bar("Exporting records", total=len(infos)) as step:
            done = export_records(folder, infos, archive, force=force, step=step)
    size = archive.stat().st_size
    left = f" Left out: {show_reasons(done.skipped)}." if done.skipped else ""
    _told(
        as_json,
        {"store": str(root), "archive": str(archive), "archive_bytes": size, **dataclasses.asdict(done)},
        f"{show_count(done.records, 'record')} ({show_bytes(done.bytes)}) written to {archive}.{left}",
    )
    return 1 if set(done.skipped) - {"gone"} else 0


def import_archive(root: Path, archive: Path, *, create: bool, as_json: bool) -> int:
    with StoreFolder(root, create=create) as folder, Progress().status(f"Importing {archive}") as report:
        done = import_records(folder, archive, step=report)
    left = sum(done.skipped.values())
    text = f"{show_count(done.added, 'record')} ({show_bytes(done.bytes)}) added, {done.present} were there already"
    text += f"; {left} members left out ({show_reasons(done.skipped)})." if left else "."
    _told(as_json, {"store": str(root), "archive": str(archive), **dataclasses.asdict(done)}, text)
    if left and not as_json:
        print_table("Left out", ("member", "why"), done.named)
    return 1 if left else 0


def _told(as_json: bool, document: dict[str, Any], text: str) -> int:
    if as_json:
        print_json(document)
    else:
        print(text)
    return 0
