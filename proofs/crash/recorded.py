"""The calls that change files, recorded as what they do to files and names.

Put a Recorder in place of `files.os`: calls are made one at a time, and each is written down after
it was made. A recorder can die: from then on no call does anything, as after SIGKILL.

Ranks that are threads of this process share a recorder, so their calls are in one log, in the order
in which they were made: what a rank does after it heard of a call comes behind that call.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatrain import files

BLOCK = 4096


class Died(BaseException):
    """The process is no more; nothing it would do is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One thing that happens to a disk. A write is of one block at most."""

    kind: str
    """create, write, resize, fsync, sync_names, rename, unlink, mkdir, rmdir, symlink, ack"""
    path: str = ""
    target: str = ""
    file: int = -1
    """The file, whatever its name; from 0."""
    start: int = 0
    data: bytes = b""
    size: int = 0
    """Of a resize; of an ack, the step."""
    rank: int = 0
    """The rank that has done it."""


class Log:
    """What was done, in order, by one process after another."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._next = 0
        self._files: dict[int, int] = {}
        """By the system's number, which may come again after a delete."""

    def new_file(self, number: int) -> int:
        self._files[number], self._next = self._next, self._next + 1
        return self._files[number]

    def file(self, number: int) -> int:
        return self._files[number]


class Recorder:
    """Passes on every name of `os`; what changes a disk is written down in `log`."""

    def __init__(
        self,
        root: Path,
        log: Log,
        die_at: int | None = None,
        rank_here: Callable[[], int] = lambda: 0,
    ) -> None:
        """`rank_here` returns the rank whose thread is asking."""
        self._root, self.log, self._die_at, self._rank_here = root, log, die_at, rank_here
        self._lock = threading.Lock()
        self._fds: dict[int, int | str] = {}
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        change = getattr(type(self), f"_on_{name}", None)
        if change is None:
            return real

        def call(*args: Any) -> Any:
            with self._lock:
                if self._die_at is not None and self.num_calls >= self._die_at and name != "close":
                    raise Died
                self.num_calls += 1
                return change(self, real, *args)

        return call

    def ack(self, step: int) -> None:
        """Write down that a save was acknowledged."""
        with self._lock:
            self._add("ack", size=step)

    def close_all(self) -> None:
        """Close what a process that died has left open: its lock is then free."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _add(self, kind: str, **facts: Any) -> None:
        self.log.ops.append(Op(kind=kind, rank=self._rank_here(), **facts))

    def _name(self, path: str | Path) -> str:
        if not Path(path).is_relative_to(self._root):
            return "/"  # the folder that holds the root: nothing in it is recorded
        name = str(Path(path).relative_to(self._root))
        return "" if name == "." else name

    def _on_open(self, real: Any, path: Path, flags: int, mode: int = 0o777) -> int:
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        try:
            fd: int = real(path, flags, mode)
        finally:
            if is_new and os.path.lexists(path):  # a refused O_DIRECT may have made it
                file = self.log.new_file(os.stat(path).st_ino)
                self._add("create", path=self._name(path), file=file)
        status = os.fstat(fd)
        is_folder = stat.S_ISDIR(status.st_mode)
        self._fds[fd] = self._name(path) if is_folder else self.log.file(status.st_ino)
        return fd

    def _on_close(self, real: Any, fd: int) -> None:
        self._fds.pop(fd, None)
        real(fd)

    def _on_pwrite(self, real: Any, fd: int, memory: memoryview, start: int) -> int:
        count: int = real(fd, memory, start)
        self._write(fd, start, bytes(memory[:count]))
        return count

    def _on_write(self, real: Any, fd: int, memory: memoryview) -> int:
        start = os.fstat(fd).st_size  # all of ours append
        count: int = real(fd, memory)
        self._write(fd, start, bytes(memory[:count]))
        return count

    def _write(self, fd: int, start: int, data: bytes) -> None:
        while data:
            count = min(BLOCK - start % BLOCK, len(data))
            self._add("write", file=self._fds[fd], start=start, data=data[:count])
            start, data = start + count, data[count:]

    def _on_ftruncate(self, real: Any, fd: int, size: int) -> None:
        real(fd, size)
        self._add("resize", file=self._fds[fd], size=size)

    def _on_posix_fallocate(self, real: Any, fd: int, start: int, size: int) -> None:
        real(fd, start, size)
        self._add("resize", file=self._fds[fd], size=size)

    def _on_fsync(self, real: Any, fd: int) -> None:
        real(fd)
        what = self._fds[fd]
        if isinstance(what, str):
            self._add("sync_names", path=what)
        else:
            self._add("fsync", file=what)

    def _on_replace(self, real: Any, source: Path, target: Path) -> None:
        real(source, target)
        self._add("rename", path=self._name(source), target=self._name(target))

    def _on_unlink(self, real: Any, path: Path) -> None:
        real(path)
        self._add("unlink", path=self._name(path))

    def _on_mkdir(self, real: Any, path: Path) -> None:
        real(path)
        self._add("mkdir", path=self._name(path))

    def _on_rmdir(self, real: Any, path: Path) -> None:
        real(path)
        self._add("rmdir", path=self._name(path))

    def _on_symlink(self, real: Any, target: str, path: Path) -> None:
        real(target, path)
        self._add("symlink", path=self._name(path), target=target)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Record all file calls of the package under the recorder's root, until the block ends."""
    try:
        with patch.object(files, "os", recorder):
            yield
    finally:
        recorder.close_all()
