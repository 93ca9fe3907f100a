"""Files below a store's folder: where each lies, and the few operations that everything else here is made of."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator

from kvweave.store.base import TierError

SUFFIX = ".kvr"
TEMP = ".tmp-"
DAMAGED = "damaged"
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
"""What the system says where nothing may be written."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Files:
    """Where records and temporary files lie below one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def path(self, relative: str) -> str:
        return f"{self.folder}/{relative}"

    def record(self, name: str) -> str:
        return f"{self.folder}/{name}{SUFFIX}"

    def walk(self, tag: str | None = None) -> Iterator[tuple[str | None, os.DirEntry[str]]]:
        """Files of all records, or of one scope: with the record's name, or None for temporary ones. Unsorted."""
        for model in folders(self.folder):
            for scope in folders(model) if tag is None else [f"{model}/{tag}"]:
                for part in folders(scope):
                    place = os.path.relpath(part, self.folder)
                    for entry in entries(part):
                        if entry.name.startswith(TEMP):
                            yield None, entry
                        elif entry.name.endswith(SUFFIX) and is_hex(entry.name[: -len(SUFFIX)]):
                            yield f"{place}/{entry.name[: -len(SUFFIX)]}", entry

    def remove_empty(self, tag: str) -> None:
        """Take away the folders of a scope that hold nothing any more."""
        for model in folders(self.folder):
            for part in (*folders(f"{model}/{tag}"), f"{model}/{tag}"):
                with contextlib.suppress(OSError):  # not empty: a new record came
                    os.rmdir(part)

    def space(self) -> tuple[int, int]:
        """Bytes of the file system: free for other than the superuser, and all. Raises ``TierError``."""
        try:
            found = os.statvfs(self.folder)
        except OSError as error:
            raise TierError("io", str(error)) from error
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def scope_of(name: str) -> bytes:
    """The scope's tag in a record's name."""
    return bytes.fromhex(name.split("/")[1])


def is_hex(text: str) -> bool:
    return len(text) % 2 == 0 and re.fullmatch("[0-9a-f]+", text) is not None


def private_file(path: str) -> int:
    """A descriptor of ``path``, created if need be, readable by the owner alone whatever the umask."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def replace_file(path: str, text: str) -> None:
    """Make ``text`` the content of ``path``: durably, and all of it or nothing."""
    folder, name = os.path.split(path)
    temp = f"{folder}/.{name}.{uuid.uuid4().hex}"
    try:
        with open(private_file(temp), "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temp, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one that counts
            os.unlink(temp)
        raise
    sync_folder(folder)


def lock_file(descriptor: int, patience: float) -> None:
    """Lock an open file against other processes; ends with the descriptor. Raises ``TierError("busy")``."""
    limit = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                raise TierError("busy", "another process holds a lock of the store") from None
            time.sleep(0.005)


def make_folders(top: str, path: str, durable: bool) -> None:
    """Create ``path`` and what is missing between it and ``top``, for the owner alone whatever the umask."""
    if path == top or os.path.isdir(path):
        return
    make_folders(top, os.path.dirname(path), durable)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        if stat.S_IMODE(os.stat(path).st_mode) != 0o700:
            os.chmod(path, 0o700)
    if durable:
        sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size_of(path: str) -> int | None:
    """Bytes of a file; None if there is no such file."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def first_bytes(path: str, length: int) -> bytes | None:
    """At most ``length`` bytes from the start of a file; None if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.pread(descriptor, length, 0)
    finally:
        os.close(descriptor)


def unlink(path: str) -> bool:
    """True if there was such a file."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def folders(path: str) -> list[str]:
    """Sub-folders with hexadecimal names, sorted; none if ``path`` is gone."""
    return sorted(entry.path for entry in entries(path) if is_hex(entry.name) and entry.is_dir(follow_symlinks=False))


def entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
