"""Which records of a store folder are meant: by key, tenant, model, age. Loads no torch, so mistakes are told at once."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.core.keys import ChunkKey, Scope
from kvweave.errors import InvalidOption, StoreError

if TYPE_CHECKING:
    from kvweave.store.base import BlobInfo

MARKER = "kvweave-store.json"
"""What makes a folder a store; a test holds it equal to the disk tier's."""
_NAME = re.compile(r"([0-9a-f]{16})/([0-9a-f]{16})/([0-9a-f]{2})/([0-9a-f]{32})")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def require_store(root: Path) -> None:
    """Raises ``InvalidOption`` unless ``root`` is a store folder. Creates nothing."""
    try:
        if (root / MARKER).is_file():
            return
        if root.is_dir():
            why = f"isn't a store: it has no {MARKER}"
        else:
            why = "is a file, not a store folder" if root.exists() else "doesn't exist"
    except OSError as error:
        why = f"can't be read ({error.strerror})"
    raise InvalidOption(f"{root} {why}. Give the folder of a disk tier, as in --store FOLDER.")


def tag_of(tenant: str, secret: bytes = b"") -> str:
    """A tenant's tag in hex, which names his folders whatever his epoch."""
    return Scope.of(tenant, 0, secret).tag.hex()


def parse_key(name: str) -> ChunkKey | None:
    """The key of ``model/scope/xx/content``; None if it isn't one."""
    match = _NAME.fullmatch(name)
    if match is None or match[3] != match[4][:2]:
        return None
    model, scope, _, content = match.groups()
    return ChunkKey(bytes.fromhex(model), bytes.fromhex(scope), bytes.fromhex(content))


def parse_age(text: str) -> float:
    """Seconds of ``90s``, ``30m``, ``12h``, ``7d``, ``2w``; raises ``InvalidOption``."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(s|m|h|d|w)", text.strip())
    if match is None:
        raise InvalidOption(f"'{text}' is not a span of time. Write a number and s, m, h, d or w, as in 12h or 7d.")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Selection:
    """Records that meet every condition given. Hexadecimal texts may be cut off behind any digit.

    Raises ``InvalidOption`` for what can't be a key, tag or fingerprint.
    """

    keys: tuple[str, ...] = ()
    """Each names one record: the whole name, or the first digits of its key."""
    prefix: str | None = None
    """First digits of the keys of any number of records."""
    scope: str | None = None
    """Of the tag of a tenant."""
    model: str | None = None
    """Of the model's fingerprint."""
    older_than: float | None = None
    """Seconds since it was stored."""
    unused_for: float | None = None
    """Seconds since it was last used."""
    pinned: bool | None = None

    def __post_init__(self) -> None:
        for key in self.keys:
            if parse_key(key) is None:
                _check_hex(key, "key", 32)
        for name, digits in (("prefix", 32), ("scope", 16), ("model", 32)):
            if (value := getattr(self, name)) is not None:
                _check_hex(value, name, digits)

    @property
    def everything(self) -> bool:
        return all(getattr(self, f.name) == f.default for f in fields(self))

    @property
    def tag(self) -> bytes | None:
        """The tenant's tag, if it is given in full."""
        return bytes.fromhex(self.scope) if self.scope is not None and len(self.scope) == 16 else None

    def choose(self, found: Iterable[BlobInfo]) -> list[BlobInfo]:
        """Those of ``found`` that are meant. Raises ``StoreError`` if a key names none, ``InvalidOption`` if several."""
        listed = list(found)
        if self.keys:
            named = {info.key: info for key in self.keys for info in [_one(key, listed)]}
            listed = list(named.values())
        now = time.time()
        return [info for info in listed if self._fits(info, now)]

    def _fits(self, info: BlobInfo, now: float) -> bool:
        key = info.key
        return (
            (self.prefix is None or key.content.hex().startswith(self.prefix))
            and (self.scope is None or key.scope.hex().startswith(self.scope))
            and (self.model is None or key.model.hex().startswith(self.model[:16]))
            and (self.older_than is None or now - info.created >= self.older_than)
            and (self.unused_for is None or now - info.last_used >= self.unused_for)
            and (self.pinned is None or self.pinned == (info.pinned_until > now))
        )


def _one(key: str, listed: Iterable[BlobInfo]) -> BlobInfo:
    if (whole := parse_key(key)) is not None:
        matches = [info for info in listed if info.key == whole]
    else:
        matches = [info for info in listed if info.key.content.hex().startswith(key)]
    if not matches:
        raise StoreError(f"There is no record {key}. See what there is with kvweave cache ls.")
    if len(matches) > 1:
        raise InvalidOption(f"Key {key} is ambiguous: {len(matches)} records start with it. Give more digits.")
    return matches[0]


def _check_hex(text: str, what: str, most: int) -> None:
    if not re.fullmatch(f"[0-9a-f]{{1,{most}}}", text):
        raise InvalidOption(f"'{text}' is no {what}. Give 1 to {most} of the digits 0-9 and a-f, as kvweave cache ls shows.")
