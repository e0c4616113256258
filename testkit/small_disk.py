"""A disk of a few bytes under one folder: put it in place of files.os."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatrain import files


class SmallDisk:
    """Passes on every name of `os`; what would grow the folder beyond `num_bytes` is refused."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder, self.num_bytes = folder, num_bytes
        self.tells_its_size = True
        """Otherwise statvfs says that there is plenty, as it does where a quota is used up."""
        self.before_unlink: Callable[[Path], None] = lambda path: None
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        total = 0
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):
                total += path.lstat().st_size if path.is_file() else 0
        return total

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _grow(self, fd: int, end: int) -> None:
        if self.used + max(0, end - os.fstat(fd).st_size) > self.num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        with self._lock:
            self._grow(fd, offset + length)
            os.posix_fallocate(fd, offset, length)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        with self._lock:
            self._grow(fd, offset + len(data))
            return os.pwrite(fd, data, offset)

    def statvfs(self, path: Path) -> Any:
        free = max(0, self.num_bytes - self.used) if self.tells_its_size else 1 << 40
        return SimpleNamespace(f_bavail=free, f_frsize=1)

    def unlink(self, path: Path) -> None:
        self.before_unlink(path)
        os.unlink(path)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Let the package see a disk of so many bytes under `folder`."""
    disk = SmallDisk(folder, num_bytes)
    with patch.object(files, "os", disk):
        yield disk
