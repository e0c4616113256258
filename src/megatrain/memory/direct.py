"""Weights between disk and memory, past the page cache (O_DIRECT).

A model folder or checkpoint is read or written once, and caching it would push out memory that
training needs. Where a file system has no direct I/O the same calls go through the cache, which is
dropped behind them.

Laws (tests/memory/test_direct.py)
    1. Bytes arrive as they were given, whatever their number.
    2. Memory is that of the queue's buffers, whatever the number and size of files.
    3. A file that was not finished is removed.
    4. Once `let_go` returns, the sources may change: the file has the earlier bytes.
    5. A file on storage that has stalled is closed and removed when its last call has returned.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Self

import xxhash
from torch import Tensor

from megatrain import files
from megatrain.errors import DiskError, StorageTimeout
from megatrain.files import explained
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.file_calls import FileCalls

DISK_PAGE = 4096
"""A multiple of the logical block of every disk we know; direct I/O needs it in each offset."""
CHUNK_BYTES = 8 << 20
"""The size of one write, and of the data of one hash."""


def as_memory(buffer: Tensor) -> memoryview:
    """Return the bytes of a uint8 tensor as a memoryview, for calls that know no tensors."""
    return buffer.numpy().data


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy uint8 to uint8 on this thread alone, others running.

    Not `copy_`: it would start a thread team in each of our threads, competing for cores.
    """
    target.numpy()[:] = source.numpy()


def _gather(pieces: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy the pieces into the buffer, end to end."""
    start = 0
    for piece in pieces:
        copy_bytes(buffer[start : start + len(piece)], piece)
        start += len(piece)


def digest(memory: memoryview) -> str:
    """Return the hash of a chunk: against bit rot and mix-ups, not against an adversary."""
    return xxhash.xxh3_128_hexdigest(memory)


def digests(data: bytes) -> tuple[str, ...]:
    """Return the hashes of a small file's chunks."""
    starts = range(0, len(data), CHUNK_BYTES)
    return tuple(digest(memoryview(data)[start : start + CHUNK_BYTES]) for start in starts)


class DirectReader:
    """Reads byte ranges of one file. Safe to use from many threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained("open", path):
            self._fd, self._direct = files.open_direct(path, os.O_RDONLY)
            self.num_bytes = os.fstat(self._fd).st_size

    def read(self, start: int, stop: int, buffer: Tensor) -> Tensor:
        """Return the bytes [start, stop) as a view into `buffer`, valid until its next use.

        `buffer` must have room for the range and two pages. Raises DiskError, also at end of file.
        """
        first = start - start % DISK_PAGE
        last = -(-stop // DISK_PAGE) * DISK_PAGE
        memory = as_memory(buffer)
        have = 0
        while first + have < stop:
            with explained("read", self.path):
                count = files.read_at(self._fd, memory[have : last - first], first + have)
            if count == 0:
                raise DiskError(
                    f"{self.path} ends at byte {first + have}; bytes up to {stop} were expected"
                )
            have += count
        if not self._direct:
            files.drop_cache(self._fd, first, last - first)
        return buffer[start - first : stop - first]

    def close(self) -> None:
        """Close the file."""
        files.close(self._fd)

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WriteQueue:
    """A few buffers and the threads that carry them to the disk, for any number of files."""

    DEPTH = 6

    def __init__(self, calls: FileCalls | None = None) -> None:
        """`calls` are the caller's, who closes them; without any, the queue has its own."""
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(self.DEPTH):
            self._free.put(aligned_buffer(CHUNK_BYTES))
        self.calls = calls or FileCalls()
        self._owns_calls = calls is None

    def take(self) -> Tensor:
        """Return a buffer; waits until one is free. Raises StorageTimeout."""
        taken: list[Tensor] = []

        def attempt(seconds: float | None) -> bool:
            with suppress(queue.Empty):
                taken.append(self._free.get(timeout=seconds))
            return bool(taken)

        self.calls.wait(attempt)
        return taken[0]

    def give(self, buffer: Tensor) -> None:
        self._free.put(buffer)

    def submit(
        self, work: Callable[[], None], dropped: Callable[[], object] = bool
    ) -> Future[None]:
        """Let a thread do `work`, in the order of submission (FileCalls.submit)."""
        return self.calls.submit(work, dropped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for all work, unless storage has stalled."""
        with suppress(StorageTimeout):
            self.calls.drain()
        if self._owns_calls:
            self.calls.close()


def _new_file(path: Path, num_bytes: int) -> tuple[int, bool]:
    """Return the descriptor of a new file with its space reserved, and whether it is direct."""
    with explained("create", path):
        fd, is_direct = files.open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with explained("reserve space for", path):
            files.reserve(fd, num_bytes)
    except DiskError:
        _drop_file(fd, path)
        raise
    return fd, is_direct


def _drop_file(fd: int, path: Path) -> None:
    files.close(fd)
    files.remove(path)


class DirectWriter:
    """Writes one new file from its start to its end.

    The queue's threads copy what `write` was given, hash and write it. Until `let_go` or `finish`
    returns it must stay as it is. `finish` waits for stable storage, `finish_later` leaves that to
    the queue; `abandon` removes the file. One of these must be called, whatever happens: use a
    `with` block, or see to it.
    """

    def __init__(self, path: Path, num_bytes: int, carrier: WriteQueue) -> None:
        self.path = path
        self._num_bytes = num_bytes
        self._queue = carrier
        self._fd, self._direct = carrier.calls.do(
            lambda: _new_file(path, num_bytes), lambda opened: _drop_file(opened[0], path)
        )
        self._pieces: list[Tensor] = []
        """Pieces of the chunk that is not yet sent."""
        self._pending: list[Future[None]] = []
        self._copied: list[threading.Event] = []
        self._used = self._sent = 0
        self._closed = False
        self.digests: dict[int, str] = {}
        """Digests by number of chunk; complete once the file is finished."""

    def write(self, data: Tensor) -> None:
        """Append the bytes of a uint8 tensor; waits while all buffers of the queue are in use."""
        while len(data):
            count = min(CHUNK_BYTES - self._used, len(data))
            self._pieces.append(data[:count])
            self._used += count
            data = data[count:]
            if self._used == CHUNK_BYTES:
                self._send()

    def let_go(self) -> None:
        """Return when all bytes, which must have been written, are copied: sources may change."""
        self._send_rest()
        for copied in self._copied:
            self._queue.calls.wait(copied.wait)
        self._copied = []

    def finish(self) -> None:
        """Write the rest, cut the file to size, and wait for stable storage."""
        self._queue.calls.result(self.finish_later())

    def finish_later(self) -> Future[None]:
        """Finish the file in the background; the result raises what went wrong."""
        self._send_rest()
        pending, self._pending = self._pending, []
        return self._queue.submit(lambda: self._finish(pending), lambda: self._close(remove=True))

    def abandon(self) -> None:
        """Remove the file, unless it is finished; on storage that has stalled, afterwards."""
        self._pieces = []
        pending, self._pending = self._pending, []
        calls = self._queue.calls
        for future in pending:
            with suppress(DiskError):
                calls.result(future)
        if calls.is_given_up:
            calls.afterwards(lambda: self._close(remove=True))
        elif not self._closed:
            with suppress(StorageTimeout):
                calls.do(lambda: self._close(remove=True))

    def _finish(self, pending: list[Future[None]]) -> None:
        # Chunks were submitted before this, so each has ended or is with another thread.
        try:
            for future in pending:
                future.result()
            self._queue.calls.raise_if_given_up()
            with explained("write", self.path):
                files.finish(self._fd, self._num_bytes)
                if not self._direct:
                    files.drop_cache(self._fd)
        except BaseException:
            for future in pending:
                with suppress(DiskError):
                    future.result()
            self._close(remove=True)
            raise
        self._close(remove=self._queue.calls.is_given_up)

    def _send_rest(self) -> None:
        if self._used:
            self._send()
        assert self._sent == self._num_bytes, "the number of bytes differs from the announced one"

    def _send(self) -> None:
        buffer, pieces, used, offset = self._queue.take(), self._pieces, self._used, self._sent
        self._pieces = []
        self._used = 0
        self._sent = offset + used
        copied = threading.Event()
        self._copied.append(copied)

        def put() -> None:
            try:
                try:
                    _gather(pieces, buffer)
                finally:
                    pieces.clear()  # let go of the sources
                    copied.set()
                self._put(buffer, used, offset)
            finally:
                self._queue.give(buffer)

        self._pending.append(self._queue.submit(put))

    def _put(self, buffer: Tensor, used: int, offset: int) -> None:
        memory = as_memory(buffer)
        self.digests[offset // CHUNK_BYTES] = digest(memory[:used])
        whole = -(-used // DISK_PAGE) * DISK_PAGE if self._direct else used
        buffer[used:whole].zero_()
        with explained("write", self.path):
            files.write_at(self._fd, memory[:whole], offset)

    def _close(self, *, remove: bool) -> None:
        if not self._closed:
            self._closed = True
            if remove:
                _drop_file(self._fd, self.path)
            else:
                files.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
