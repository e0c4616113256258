"""The system's file calls, counted, written down, and made to fail: put it in place of files.os."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatrain import files

CHANGES = frozenset(
    [
        *("open", "write", "pwrite", "fsync", "ftruncate", "posix_fallocate"),
        *("replace", "unlink", "mkdir", "rmdir", "symlink"),
    ]
)
"""What a save does to a disk."""
READS = frozenset(["open", "preadv"])
Call = tuple[str, tuple[Any, ...]]


class FaultyOs:
    """Passes on every name of `os`; those in `counted` are counted here."""

    def __init__(
        self,
        *,
        fail_at: int | None = None,
        error: int = 28,
        counted: frozenset[str] = CHANGES,
        persistent: bool = False,
        before: Callable[[int, str, tuple[Any, ...]], None] | None = None,
    ) -> None:
        """Let the call number `fail_at`, from 0, fail with errno `error`; later ones if told."""
        self._fail_at, self._error, self._counted = fail_at, error, counted
        self._persistent, self._before = persistent, before
        self._lock = threading.Lock()
        self.num_calls = 0
        self.log: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self._counted:
            return real

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                number, self.num_calls = self.num_calls, self.num_calls + 1
                self.log.append((name, args))
            if self._before is not None:
                self._before(number, name, args)
            if self._fail_at is not None and (
                number == self._fail_at or (self._persistent and number > self._fail_at)
            ):
                raise OSError(self._error, os.strerror(self._error))
            return real(*args, **options)

        return call


@contextmanager
def faulty(**settings: Any) -> Iterator[FaultyOs]:
    """Let all file calls of the package go through a FaultyOs."""
    replaced = FaultyOs(**settings)
    with patch.object(files, "os", replaced):
        yield replaced


Change = tuple[str, Path, Path]
"""What was done, to which path, and what became of it: another path for `rename`, else the same."""


class RecordingOs:
    """Passes on every name of `os`, and writes down in order what a power loss could undo."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self.changes: list[Change] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _note(self, action: str, path: Any, into: Any = None) -> None:
        with self._lock:
            self.changes.append((action, Path(path), Path(path if into is None else into)))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        fd = os.open(path, flags, mode)
        self._paths[fd] = Path(path)
        if is_new:
            self._note("create", path)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self._note("write", self._paths[fd])
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        self._note("fsync", self._paths[fd])

    def replace(self, source: Any, target: Any) -> None:
        os.replace(source, target)
        self._note("rename", source, target)

    def link(self, source: Any, target: Any) -> None:
        os.link(source, target)
        self._note("link", source, target)

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        os.mkdir(path, mode)
        self._note("create", path)

    def unlink(self, path: Any) -> None:
        os.unlink(path)
        self._note("unlink", path)


@contextmanager
def recorded() -> Iterator[list[Change]]:
    """Let all file calls of the package be written down; yield the list that grows."""
    system = RecordingOs()
    with patch.object(files, "os", system):
        yield system.changes


def volatile(changes: Sequence[Change], until: Path | None = None) -> set[Path]:
    """Return the files whose bytes or names a power loss could take.

    That is after the last change, or just before `until` got its name by a rename.
    """
    written: set[Path] = set()
    named: set[Path] = set()
    for action, path, into in changes:
        if action == "rename" and into == until:
            return (written | named) - {path}
        if action in ("create", "write"):
            written |= {path} if action == "write" or not path.is_dir() else set()
            named |= {path} if action == "create" else set()
        elif action == "fsync":
            written.discard(path)
            named = {name for name in named if name.parent != path}
        else:
            if path in written:
                written.add(into)
            if action in ("rename", "unlink"):
                written.discard(path)
                named.discard(path)
            if action in ("rename", "link"):
                named.add(into)
    assert until is None, f"{until} got no name"
    return written | named
