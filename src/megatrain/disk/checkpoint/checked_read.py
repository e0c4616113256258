"""Files read in parallel, each chunk compared with its hash before it is used.

One pass over the disk, past the page cache, with a buffer per worker. Users of the bytes take
them chunk by chunk, once they are known to be right; or a worker reads a file in its own order
(CheckedFile).

Laws (tests/disk/checkpoint/test_restore.py)
    1. A changed, missing, cut, swapped or stale file is found, and the tensor in it named.
    2. Bytes that do not match their hash are never passed on.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megatrain.disk.checkpoint.manifest import FileRecord
from megatrain.disk.hf.safetensors_format import TensorEntry, parse_header
from megatrain.errors import CheckpointCorrupted, DiskError, WeightsFormatError
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import (
    CHUNK_BYTES,
    DISK_PAGE,
    DirectReader,
    as_memory,
    copy_bytes,
    digest,
)
from megatrain.progress import Advance, byte_progress

NUM_HASH_WORKERS = 4
Take = Callable[[int, Tensor], None]
"""Gets a chunk's first byte in the file, and its bytes, once they are known to be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    reader: DirectReader
    name: str
    start: int
    stop: int
    expected: str
    take: Take | None


def read_checked(
    folder: Path,
    records: Mapping[str, FileRecord],
    title: str,
    takes: Mapping[str, Take] | None = None,
    spans: Mapping[str, Iterable[range]] | None = None,
    *,
    shown: bool = True,
) -> None:
    """Read all files on all workers, and pass their chunks to `takes`, by file.

    Of a file that has `spans`, it reads the chunks that have some of their bytes: those that a rank
    needs. Raises CheckpointCorrupted or DiskError for the first file that does not match its
    record.
    """
    takes, spans = takes or {}, spans or {}
    with ExitStack() as stack:
        chunks: list[_Chunk] = []
        for name, record in sorted(records.items()):
            reader = stack.enter_context(_opened(folder, name, record.num_bytes))
            for number in _chunks_of(record, spans.get(name)):
                start = number * CHUNK_BYTES
                chunk = _Chunk(
                    reader=reader,
                    name=name,
                    start=start,
                    stop=min(start + CHUNK_BYTES, record.num_bytes),
                    expected=record.digests[number],
                    take=takes.get(name),
                )
                chunks.append(chunk)
        num_bytes = sum(chunk.stop - chunk.start for chunk in chunks)
        title = f"{title} {folder.name}"
        _run(chunks, stack.enter_context(byte_progress(title, num_bytes, shown=shown)))


def _chunks_of(record: FileRecord, spans: Iterable[range] | None) -> list[int]:
    """Return the numbers of the chunks that have bytes of `spans`; all chunks without any."""
    if spans is None:
        return list(range(len(record.digests)))
    found: set[int] = set()
    for span in spans:
        if span:
            found.update(range(span.start // CHUNK_BYTES, -(-span.stop // CHUNK_BYTES)))
    return sorted(found)


def _opened(folder: Path, name: str, num_bytes: int) -> DirectReader:
    try:
        reader = DirectReader(folder / name)
    except FileNotFoundError:
        raise CheckpointCorrupted(f"{folder / name} is missing") from None
    if reader.num_bytes != num_bytes:
        reader.close()
        raise CheckpointCorrupted(
            f"{folder / name} has {reader.num_bytes} bytes, {num_bytes} were written"
        )
    return reader


class CheckedFile:
    """A file that one thread reads in any order, its last chunks in memory."""

    KEPT_CHUNKS = 5
    """Enough for moments, their scales and remainders, so that a chunk is read once."""

    def __init__(self, folder: Path, name: str, record: FileRecord, advance: Advance) -> None:
        """Raises CheckpointCorrupted or DiskError."""
        self._reader = _opened(folder, name, record.num_bytes)
        self._record, self._advance = record, advance
        self._chunks: dict[int, tuple[Tensor, Tensor]] = {}
        """A buffer and the chunk in it, by number; the last one read is at the end."""
        self._counted: set[int] = set()

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of the bytes [start, stop), known to be right.

        Raises CheckpointCorrupted or DiskError.
        """
        found = torch.empty(stop - start, dtype=torch.uint8)
        for number in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            chunk, first = self._chunk(number), number * CHUNK_BYTES
            begin, end = max(start, first), min(stop, first + len(chunk))
            copy_bytes(found[begin - start : end - start], chunk[begin - first : end - first])
        return found

    def _chunk(self, number: int) -> Tensor:
        if number in self._chunks:
            self._chunks[number] = self._chunks.pop(number)
            return self._chunks[number][1]
        if len(self._chunks) == self.KEPT_CHUNKS:
            buffer, _ = self._chunks.pop(next(iter(self._chunks)))
        else:
            buffer = aligned_buffer(CHUNK_BYTES + 2 * DISK_PAGE)
        start = number * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, self._record.num_bytes)
        data = _checked(self._reader, start, stop, self._record.digests[number], buffer)
        self._chunks[number] = buffer, data
        if number not in self._counted:
            self._counted.add(number)
            self._advance(len(data))
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()


def _run(chunks: Iterable[_Chunk], advance: Advance) -> None:
    buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for _ in range(NUM_HASH_WORKERS):
        buffers.put(aligned_buffer(CHUNK_BYTES + 2 * DISK_PAGE))

    def work(chunk: _Chunk) -> None:
        buffer = buffers.get()
        try:
            data = _checked(chunk.reader, chunk.start, chunk.stop, chunk.expected, buffer)
            if chunk.take is not None:
                chunk.take(chunk.start, data)
        finally:
            buffers.put(buffer)
        advance(chunk.stop - chunk.start)

    with ThreadPoolExecutor(NUM_HASH_WORKERS, thread_name_prefix="restore") as pool:
        futures = [pool.submit(work, chunk) for chunk in chunks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _checked(reader: DirectReader, start: int, stop: int, expected: str, buffer: Tensor) -> Tensor:
    """Return a chunk, read into `buffer`. Raises CheckpointCorrupted if its hash is another."""
    data = reader.read(start, stop, buffer)
    if digest(as_memory(data)) != expected:
        raise _damaged(reader, start, stop)
    return data


def _damaged(reader: DirectReader, start: int, stop: int) -> CheckpointCorrupted:
    """Return the error that names the tensors in a chunk, as far as the header can be read."""
    where = f"{reader.path}: bytes {start} to {stop} do not match their hash"
    names = [entry.name for entry in _entries(reader) if entry.start < stop and entry.stop > start]
    if not names:
        return CheckpointCorrupted(where)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return CheckpointCorrupted(f"{where} (in {shown})")


def _entries(reader: DirectReader) -> list[TensorEntry]:
    buffer = aligned_buffer(CHUNK_BYTES + 2 * DISK_PAGE)
    try:
        length = int.from_bytes(as_memory(reader.read(0, 8, buffer)), "little")
        if not 2 <= length <= CHUNK_BYTES - 8:
            return []
        header = bytes(as_memory(reader.read(8, 8 + length, buffer)))
        return parse_header(header, reader.num_bytes - 8 - length, reader.path.name)
    except (DiskError, WeightsFormatError):
        return []
