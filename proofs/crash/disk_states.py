"""What a disk may hold after a power loss, given what was done to it.

Of what was not forced any part may be there: each block of a file, each length, each name. Ranks
may be on several hosts, so an fsync forces only what its own rank has done. Where
there are too many parts to try all, some are drawn, and blocks are then also torn in sectors.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import PurePosixPath

from proofs.crash.recorded import Op

NAME_OPS = frozenset(["create", "rename", "unlink", "mkdir", "rmdir", "symlink"])
DATA_OPS = frozenset(["write", "resize"])
SECTOR = 512
TORN_SHARE = 0.1
Files = dict[str, bytes]
"""A state: bytes by path. Folders and links are not in it."""
_Parts = dict[int, int]
"""Operations that are on the disk; of a write, how many of its bytes."""


class Disk:
    """A log of operations, and the states it may leave."""

    def __init__(self, log: Sequence[Op]) -> None:
        self.log = log
        self._made: dict[tuple[tuple[int, int], ...], bytes] = {}
        self._unforced = list(self._all_unforced())

    def unforced(self, instant: int) -> list[int]:
        """Return the operations before an instant of which the disk may know nothing."""
        return self._unforced[instant]

    def _all_unforced(self) -> Iterator[list[int]]:
        free: list[int] = []
        yield free
        for number, op in enumerate(self.log):
            if op.kind in NAME_OPS or op.kind in DATA_OPS:
                free = [*free, number]
            elif op.kind in ("fsync", "sync_names"):
                free = [other for other in free if not self._forces(op, other)]
            yield free

    def _forces(self, op: Op, other: int) -> bool:
        """Return whether an fsync makes another operation durable."""
        forced = self.log[other]
        if forced.rank != op.rank:
            return False
        if op.kind == "fsync":
            return forced.kind in DATA_OPS and forced.file == op.file
        return forced.kind in NAME_OPS and _folder(forced.path) == op.path

    def states(self, instant: int, most: int, draw: random.Random) -> Iterator[Files]:
        """Yield states that a power loss at an instant may leave, `most` at most, no two alike."""
        free = self.unforced(instant)
        parts = {number: self._length(number) for number in range(instant)}
        if 2 ** len(free) <= most:
            for kept in itertools.product((False, True), repeat=len(free)):
                gone = {number for number, is_kept in zip(free, kept, strict=True) if not is_kept}
                yield self.files({n: length for n, length in parts.items() if n not in gone})
            return
        seen: set[tuple[int, ...]] = set()
        while len(seen) < most:
            lengths = tuple(self._drawn(number, draw) for number in free)
            if lengths not in seen:
                seen.add(lengths)
                changed = parts | dict(zip(free, lengths, strict=True))
                yield self.files({n: length for n, length in changed.items() if length >= 0})

    def whole(self, instant: int) -> Files:
        """Return the state of a system that did not lose power."""
        return self.files({number: self._length(number) for number in range(instant)})

    def files(self, parts: _Parts) -> Files:
        """Return the files of a disk that knows these operations."""
        names: dict[str, int] = {}
        folders = {""}
        data: dict[int, list[tuple[int, int]]] = {}
        for number, length in parts.items():
            op = self.log[number]
            if op.kind in DATA_OPS:
                data.setdefault(op.file, []).append((number, length))
            elif op.kind == "create":
                names[op.path] = op.file
            elif op.kind == "rename" and op.path in names:
                names[op.target] = names.pop(op.path)
            elif op.kind == "unlink":
                names.pop(op.path, None)
            elif op.kind == "mkdir":
                folders.add(op.path)
            elif op.kind == "rmdir":
                folders.discard(op.path)
        return {
            path: self._bytes(tuple(data.get(file, ())))
            for path, file in names.items()
            if _is_reached(path, folders)
        }

    def _bytes(self, done: tuple[tuple[int, int], ...]) -> bytes:
        if done not in self._made:
            content = bytearray()
            for number, length in done:
                op = self.log[number]
                size = op.size if op.kind == "resize" else max(len(content), op.start + length)
                content = content[:size] + bytes(max(0, size - len(content)))
                if op.kind == "write":
                    content[op.start : op.start + length] = op.data[:length]
            self._made[done] = bytes(content)
        return self._made[done]

    def _length(self, number: int) -> int:
        return len(self.log[number].data)

    def _drawn(self, number: int, draw: random.Random) -> int:
        """Return -1 for an operation that is lost, or how many of its bytes are there."""
        length = self._length(number)
        if length and draw.random() < TORN_SHARE:
            return draw.randrange(-(-length // SECTOR)) * SECTOR
        return length if draw.random() < 0.5 else -1


@cache
def _folder(path: str) -> str:
    parent = str(PurePosixPath(path).parent)
    return "" if parent == "." else parent


def _is_reached(path: str, folders: set[str]) -> bool:
    while path := _folder(path):
        if path not in folders:
            return False
    return True
