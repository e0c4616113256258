"""Every file call of the package that moves weights or must survive a crash.

Weights go past the page cache (O_DIRECT): a model folder is read or written once, and caching it
would push out memory that training needs. Where a file system has no direct I/O the same calls go
through the cache, which is dropped behind them.

Writes become visible all at once: a temporary name, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatrain.errors import DiskError

PAGE = 4096
"""A multiple of the logical block of every disk we know; direct I/O wants it of each offset."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned_buffer(num_bytes: int) -> Tensor:
    """Return page-aligned bytes that are given back to the system when the tensor is dropped."""
    mapping = mmap.mmap(-1, max(num_bytes, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def as_memory(buffer: Tensor) -> memoryview:
    """Return the bytes of a uint8 tensor as a memoryview, for calls that know no tensors."""
    return buffer.numpy().data


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy uint8 to uint8 on this thread alone, others running.

    Not `copy_`: it would start a team of threads in each of ours, and they would fight for cores.
    """
    target.numpy()[:] = source.numpy()


class DirectReader:
    """Reads byte ranges of one file. Safe to use from many threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _explained("open", path):
            self._fd, self._direct = _open_direct(path, os.O_RDONLY)
            self.num_bytes = os.fstat(self._fd).st_size

    def read(self, start: int, stop: int, buffer: Tensor) -> Tensor:
        """Return the bytes [start, stop) as a view into `buffer`, valid until its next use.

        `buffer` must have room for the range and two pages. Raises DiskError, also at end of file.
        """
        first = start - start % PAGE
        last = -(-stop // PAGE) * PAGE
        memory = as_memory(buffer)
        have = 0
        while first + have < stop:
            with _explained("read", self.path):
                count = os.preadv(self._fd, [memory[have : last - first]], first + have)
            if count == 0:
                raise DiskError(
                    f"{self.path} ends at byte {first + have}; bytes up to {stop} were expected"
                )
            have += count
        if not self._direct:
            os.posix_fadvise(self._fd, first, last - first, os.POSIX_FADV_DONTNEED)
        return buffer[start - first : stop - first]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class DirectWriter:
    """Writes one new file from its start to its end, gathering into aligned buffers.

    The caller fills `space()` while earlier buffers are on their way to the disk, `DEPTH` at most.
    `finish()` returns when the bytes are on stable storage; without it the file is removed.
    """

    BUFFER_BYTES = 8 << 20
    DEPTH = 3

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self._num_bytes = path, num_bytes
        with _explained("create", path):
            self._fd, self._direct = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with _explained("reserve space for", path):
                if num_bytes:
                    os.posix_fallocate(self._fd, 0, num_bytes)
        except DiskError:
            os.close(self._fd)
            remove(path)
            raise
        self._buffers = [aligned_buffer(self.BUFFER_BYTES) for _ in range(self.DEPTH)]
        self._pending: list[Future[None] | None] = [None] * self.DEPTH
        self._pool = ThreadPoolExecutor(self.DEPTH - 1, thread_name_prefix="write")
        self._turn = self._used = self._written = 0
        self._finished = False

    def space(self) -> Tensor:
        """Return the free part of the current buffer, never empty; fill it, then call `filled`."""
        if self._used == self.BUFFER_BYTES:
            self._send(self.BUFFER_BYTES)
        return self._buffers[self._turn][self._used :]

    def filled(self, num_bytes: int) -> None:
        """Take the first `num_bytes` of the last `space()` as the next bytes of the file."""
        self._used += num_bytes

    def write(self, data: Tensor) -> None:
        """Append the bytes of a uint8 tensor."""
        while len(data):
            space = self.space()
            count = min(len(space), len(data))
            copy_bytes(space[:count], data[:count])
            self.filled(count)
            data = data[count:]

    def finish(self) -> None:
        """Write what is left, cut the file to size, and wait for stable storage."""
        assert self._written + self._used == self._num_bytes, "not as many bytes as announced"
        if self._used:
            self._buffers[self._turn][self._used :].zero_()
            self._send(-(-self._used // PAGE) * PAGE)
        for turn in range(self.DEPTH):
            self._wait(turn)
        with _explained("write", self.path):
            os.ftruncate(self._fd, self._num_bytes)
            os.fsync(self._fd)
            if not self._direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._finished = True

    def _send(self, num_bytes: int) -> None:
        memory = as_memory(self._buffers[self._turn])[:num_bytes]
        self._pending[self._turn] = self._pool.submit(self._put, memory, self._written)
        self._written += num_bytes
        self._turn, self._used = (self._turn + 1) % self.DEPTH, 0
        self._wait(self._turn)

    def _put(self, memory: memoryview, offset: int) -> None:
        with _explained("write", self.path):
            while memory:
                count = os.pwrite(self._fd, memory, offset)
                memory, offset = memory[count:], offset + count

    def _wait(self, turn: int) -> None:
        future, self._pending[turn] = self._pending[turn], None
        if future is not None:
            future.result()

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True)
        os.close(self._fd)
        if not self._finished:
            remove(self.path)


def temporary_name(path: Path) -> Path:
    """Return a name beside `path` that nothing has, and that no reader takes for a result."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_file(path: Path, data: bytes) -> None:
    """Put `data` at `path`: after a crash at any instant the old bytes are there, or the new."""
    temporary = temporary_name(path)
    try:
        with _explained("write", path), temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    finally:
        remove(temporary)


def rename(source: Path, target: Path) -> None:
    """Give `source` the name `target`, replacing what was there, and make the name durable."""
    with _explained("rename to", target):
        source.replace(target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    with suppress(FileNotFoundError), _explained("remove", path):
        path.unlink()


def make_folder(path: Path) -> None:
    """Make a folder and its parents, durably; an existing one is fine."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        with _explained("make folder", folder):
            folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    with _explained("sync folder", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Return a descriptor, and whether it goes past the page cache (not all systems can)."""
    flags |= os.O_CLOEXEC
    if _O_DIRECT:
        try:
            return os.open(path, flags | _O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != 22:  # EINVAL: no direct I/O here (tmpfs and some network systems)
                raise
            flags &= ~os.O_EXCL  # the refused call may have made the file
    return os.open(path, flags, 0o644), False


@contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    """Turn the system's error into ours, which names the action, the file and the reason."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DiskError(f"cannot {action} {path}: {error.strerror or error}") from error
