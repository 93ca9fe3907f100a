"""A store's folder: whether it may be one, its epochs, and which processes use it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from kvweave.errors import InvalidOption
from kvweave.store.base import TierError
from kvweave.store.files import DAMAGED, READ_ONLY, lock_file, make_folders, private_file, replace_file, unlink

_MARKER = "kvweave-store.json"
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\w*|9p|afs|ceph|glusterfs|lustre|beegfs|gpfs|davfs|ocfs2|fuse\.(sshfs|s3fs|rclone|ceph|gluster\w*|juicefs|goofys)"
)


class Epochs:
    """When each tenant was erased last: one small file a tenant, so that it survives the catalogue. Never cached here."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def read(self, scope: bytes) -> int:
        """As it is now. Raises ``TierError``."""
        try:
            with open(self._path(scope), encoding="ascii") as file:
                return int(file.read())
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as error:  # without its epoch a tenant's records can't be trusted to be still allowed
            raise TierError("io", f"epoch file {self._path(scope)}: {error}") from error

    def raise_to(self, scope: bytes, epoch: int, patience: float) -> None:
        """Durably, to at least ``epoch``. Raises ``TierError``."""
        with self._locked(patience):
            if self._readable(scope) < epoch:
                replace_file(self._path(scope), str(epoch))

    def remove(self, scope: bytes, epoch: int, patience: float) -> None:
        """Forget it, unless it is above ``epoch``. Raises ``TierError``."""
        with self._locked(patience):
            if self._readable(scope) <= epoch:
                unlink(self._path(scope))

    @contextlib.contextmanager
    def _locked(self, patience: float) -> Iterator[None]:
        try:
            lock = private_file(f"{self._folder}/lock")
            try:
                lock_file(lock, patience)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            raise TierError("io", str(error)) from error

    def _readable(self, scope: bytes) -> int:
        """A file that holds no number is below any epoch: raising it repairs it."""
        try:
            with open(self._path(scope), encoding="ascii") as file:
                return int(file.read())
        except (FileNotFoundError, ValueError):
            return -1

    def _path(self, scope: bytes) -> str:
        return f"{self._folder}/{scope.hex()}"


class Owners:
    """Which processes use the folder. Each holds a lock that the system takes back when it dies, however it dies.

    Process ids wouldn't do: they are used again, and mean nothing in another container.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:32] or "host"
        while True:
            self.name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
            self._lock = private_file(self._path(self.name))
            lock_file(self._lock, patience=5.0)
            if os.fstat(self._lock).st_nlink:  # else: taken for a dead one's before it was locked
                return
            os.close(self._lock)

    def alive(self, owner: str) -> bool:
        if owner == self.name:
            return True
        try:
            descriptor = os.open(self._path(owner), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            lock_file(descriptor, patience=0.0)
        except TierError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove_dead(self) -> None:
        for file in os.listdir(self._folder):
            if not self.alive(file.removesuffix(".lock")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self._folder}/{file}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the lock ends with the descriptor; an old file is removed by the next start
            os.unlink(self._path(self.name))
        os.close(self._lock)

    def _path(self, owner: str) -> str:
        return f"{self._folder}/{owner}.lock"


def prepare_root(root: Path) -> bool:
    """Make ``root`` a store folder if it is empty or missing; False if it is one that can't be written.

    Raises ``InvalidOption`` where it is neither, can't be read, or lies on a network file system.
    """
    kind = file_system(root)
    if _NETWORK.fullmatch(kind):
        raise InvalidOption(
            f"{root} lies on a network file system ({kind}), whose locks and renames can't be relied on. Use a local disk, "
            "and a Redis or S3 tier to share between machines."
        )
    try:
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            make_folders(str(root.parent), str(root), durable=False)
        marked = _check_marker(root)
    except OSError as error:
        raise InvalidOption(
            f"The store folder {root} can't be used: {error.strerror}. Give a folder of your own."
        ) from error
    try:
        if not marked:
            replace_file(str(root / _MARKER), json.dumps({"format": 1}))
        for name in ("epochs", "owners", DAMAGED):
            make_folders(str(root), str(root / "v1" / name), durable=True)
        probe = root / "v1" / "owners" / f"probe-{uuid.uuid4().hex}"
        os.close(private_file(str(probe)))
        unlink(str(probe))
    except OSError as error:
        if error.errno not in READ_ONLY or not marked:
            raise InvalidOption(
                f"The store folder {root} can't be written: {error.strerror}. Make room or change it."
            ) from error
        return False
    return True


def _check_marker(root: Path) -> bool:
    """True if the folder is a store; ``InvalidOption`` if it is something else."""
    names = set(os.listdir(root))
    if _MARKER not in names and not (root / _MARKER).exists():  # the second look: another process may just have made it
        alien = sorted(n for n in names if not n.startswith(f".{_MARKER}") and n != "lost+found")
        if alien:
            raise InvalidOption(f"{root} isn't a store, and not empty ({alien[0]}, ...). Give an empty folder or a new one.")
        return False
    try:
        found = json.loads((root / _MARKER).read_text())["format"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != 1:
        raise InvalidOption(f"{root / _MARKER} isn't of format 1, which this version uses. Give another folder.")
    return True


def file_system(path: Path) -> str:
    """Type of the file system that holds ``path``, which needn't exist; "" if unknown."""
    place = os.path.realpath(path)
    best, kind = "", ""
    for mount in psutil.disk_partitions(all=True):
        point = mount.mountpoint.rstrip("/")
        if (place == point or place.startswith(f"{point}/")) and len(point) >= len(best):
            best, kind = point, mount.fstype
    return kind
