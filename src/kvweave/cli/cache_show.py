"""``kvweave cache ls``, ``stats``, ``inspect``: what a store folder holds."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from kvweave.cli.output import Progress, print_json, print_table
from kvweave.cli.units import show_bytes, show_count, show_span
from kvweave.store.admin import Checked, FolderStats, Share, StoreFolder
from kvweave.store.archive import describe, export_tensors
from kvweave.store.selection import Selection

DAMAGED = 3
_DIGITS = 16  # of a key in a table


def show_records(root: Path, selection: Selection, *, sort: str, limit: int, as_json: bool) -> None:
    with StoreFolder(root) as folder:
        chosen = folder.select(selection, sort)
        shown = [found for info in chosen[: limit or None] if (found := folder.check(info)) is not None]
    size = sum(info.size for info in chosen)
    if as_json:
        records = [_record(found) for found in shown]
        print_json({"store": str(root), "total": len(chosen), "bytes": size, "records": records})
        return
    now = time.time()
    columns = ("key", "tenant", "model", "tokens", "size", "stored", "used", "hits", "pinned for")
    print_table(f"{show_count(len(chosen), 'record')}, {show_bytes(size)}", columns, [_row(found, now) for found in shown])
    if len(shown) < len(chosen):
        print(f"{len(shown)} of {len(chosen)} are shown; --limit 0 shows all.")


def _row(found: Checked, now: float) -> tuple[str, ...]:
    info, header = found.info, found.header
    pinned = show_span(info.pinned_until - now) if info.pinned_until > now else ""
    return (
        info.key.content.hex()[:_DIGITS],
        info.key.scope.hex(),
        info.key.model.hex()[:12],
        f"{header.num_tokens:,}" if header is not None else "damaged",
        show_bytes(info.size),
        show_span(now - info.created),
        show_span(now - info.last_used) if info.last_used else "",
        str(info.hits),
        pinned,
    )


def _record(found: Checked) -> dict[str, Any]:
    info, header = found.info, found.header
    return {
        "key": info.key.content.hex(),
        "name": info.key.name,
        "scope": info.key.scope.hex(),
        "model": info.key.model.hex(),
        "bytes": info.size,
        "tokens": header and header.num_tokens,
        "codec": header and header.codec,
        "created": info.created,
        "last_used": info.last_used,
        "hits": info.hits,
        "pinned_until": info.pinned_until if info.pinned_until > time.time() else None,
        "damage": found.damage and found.damage.reason,
    }


def show_stats(root: Path, *, as_json: bool) -> None:
    with StoreFolder(root) as folder, Progress().status("Reading headers") as report:
        stats = folder.stats(report)
    if as_json:
        print_json({"store": str(root), **dataclasses.asdict(stats)})
        return
    print_table(f"Store {root}", ("", ""), _state(stats))
    print_table("Tenants", ("tag", "records", "tokens", "size"), _shares(stats.scopes))
    print_table("Models", ("fingerprint", "records", "tokens", "size"), _shares(stats.models))


def _state(stats: FolderStats) -> list[tuple[str, str]]:
    limit = "unknown" if stats.capacity is None else show_bytes(stats.capacity)
    rebuilt = f"; found damaged {stats.rebuilds} times" if stats.rebuilds else ""
    return [
        ("records", f"{stats.records:,}: {stats.tokens:,} tokens, {show_bytes(stats.bytes)}"),
        ("room", f"{show_bytes(stats.counted_bytes)} counted of {limit}; {show_bytes(stats.free)} free on the disk"),
        ("pinned", f"{show_count(stats.pinned_records, 'record')}, {show_bytes(stats.pinned_bytes)}"),
        ("damaged", f"{show_count(stats.unreadable, 'header')}; {show_count(stats.damaged_files, 'file')} kept aside"),
        ("temporary", show_count(stats.temporary_files, "file")),
        (
            "catalogue",
            f"none: read-only{rebuilt}" if stats.read_only else f"counted in {stats.rebuild_seconds:.2f} s{rebuilt}",
        ),
        ("in use by", "nobody else" if not stats.processes else f"{stats.processes} more"),
    ]


def _shares(shares: dict[str, Share]) -> list[tuple[str, str, str, str]]:
    ordered = sorted(shares.items(), key=lambda item: -item[1].bytes)
    return [(name, f"{s.records:,}", f"{s.tokens:,}", show_bytes(s.bytes)) for name, s in ordered]


def show_record(root: Path, selection: Selection, *, export: Path | None, force: bool, as_json: bool) -> int:
    with StoreFolder(root) as folder:
        (info,) = folder.select(selection)
        found = folder.check(info, full=True) or Checked(info)
        header = found.header
        if export is not None:
            export_tensors(folder, info, export, force=force)
    state = "ok" if header is not None else "gone" if found.damage is None else found.damage.reason
    detail = None if found.damage is None else found.damage.detail
    document = {**_record(found), **({} if header is None else describe(header)), "key": info.key.content.hex()}
    document |= {"verified": state, "detail": detail, "exported": export and str(export)}
    if as_json:
        print_json(document)
    else:
        print_table(
            f"Record {info.key.content.hex()}", ("", ""), [(n, _show(n, v)) for n, v in document.items() if v is not None]
        )
    return 0 if header is not None else DAMAGED


def _show(name: str, value: Any) -> str:
    if name in ("created", "last_used", "pinned_until"):
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    if name in ("bytes", "header_bytes"):
        return show_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{part}={text}" for part, text in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
