"""The system's file calls, counted, written down, and made to fail: put it in place of files.os."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
