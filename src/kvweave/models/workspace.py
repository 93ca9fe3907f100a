"""Building a folder under kvweave's home so that it appears whole or not at all.

Work happens in a scratch folder next to the final one (same file system), which is renamed at the end. A rename is
atomic: of two processes that build the same folder, the second finds it there and throws its own copy away.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvweave.errors import ConfigError, NotEnoughSpace

SCRATCH = ".building-"
STALE_SECONDS = 24 * 3600.0
FULL = {errno.ENOSPC, errno.EDQUOT}
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EIO, errno.EFBIG}
HINT = "Free some space, or move the folder: set KVWEAVE_HOME (home= in Python)."


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new empty folder in ``parent``, removed at the end whatever happens.

    Folders that a killed process left more than a day ago are removed first. Raises :class:`NotEnoughSpace` when the
    disk runs full inside the block, :class:`ConfigError` when ``parent`` can't be written.
    """
    scratch: Path | None = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(parent)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent))
        yield scratch
    except OSError as error:
        if explained := _explain(error, parent):
            raise explained from error
        raise
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise :class:`NotEnoughSpace` unless the disk of ``folder`` has ``needed`` bytes free; ``what`` needs them."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NotEnoughSpace(f"{what} needs {_size(needed)} in '{folder.parent}', but {_size(free)} are free. {HINT}")


def publish(built: Path, final: Path, usable: Callable[[Path], bool]) -> None:
    """Make ``built`` appear as ``final`` at once.

    A usable ``final`` of another process wins, a damaged one is replaced. ``built`` must lie in a scratch folder next
    to ``final``. The files are on disk before the rename, so a crash can't leave a folder whose files are empty.
    """
    for file in built.iterdir():
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
    if final.exists() and not usable(final):
        os.rename(final, built.with_name("damaged"))
    try:
        os.rename(built, final)
    except OSError:
        if not usable(final):  # not the other process: a real failure
            raise


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{SCRATCH}*"):
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except OSError:  # its owner is removing it right now
            continue
        if newest < time.time() - STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _explain(error: OSError, parent: Path) -> NotEnoughSpace | ConfigError | None:
    if error.errno in FULL:
        return NotEnoughSpace(f"The disk of '{parent}' is full. {HINT}")
    if error.errno in UNWRITABLE:
        return ConfigError(
            f"Cannot write to '{parent}': {error.strerror}. "
            "Set KVWEAVE_HOME (home= in Python) to a folder that you can write."
        )
    return None


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
