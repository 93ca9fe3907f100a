"""Erasures that a tier couldn't be told of, noted on this host, so that the next engine over that tier repeats them."""

from __future__ import annotations

import os
from pathlib import Path

from kvweave.store.base import TierError
from kvweave.store.files import entries, is_hex
from kvweave.store.folder import Epochs

_PATIENCE = 5.0  # seconds, for another process that notes something


class Notes:
    """One small file a tenant, in a folder of its own for each tier. Methods raise ``TierError``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._epochs = Epochs(os.fspath(folder))

    def all(self) -> dict[bytes, int]:
        """Epoch by scope tag: what still has to be told."""
        try:
            tags = [bytes.fromhex(entry.name) for entry in entries(os.fspath(self._folder)) if is_hex(entry.name)]
        except OSError as error:
            raise TierError("io", str(error)) from error
        return {tag: epoch for tag in tags if (epoch := self._epochs.read(tag))}

    def add(self, tag: bytes, epoch: int) -> None:
        """Durably."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TierError("io", str(error)) from error
        self._epochs.raise_to(tag, epoch, _PATIENCE)

    def done(self, tag: bytes, epoch: int) -> None:
        """The tier knows of this epoch; a later one stays noted."""
        self._epochs.remove(tag, epoch, _PATIENCE)
