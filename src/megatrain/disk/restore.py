"""Reading a checkpoint back: every chunk is hashed before its bytes are believed.

`verify` reads a folder and names what is damaged. `restore` does the same and puts the bytes where
they belong in the store on the way: one pass over the disk, in parallel, with a buffer per worker.

Laws (tests/disk/test_restore.py)
    1. What is restored has every bit of what was saved.
    2. A changed, missing, cut, swapped or stale file is found, and the tensor in it named.
    3. After CheckpointDamaged the store holds no bytes that failed their hash; it holds a mixture,
       and another checkpoint must be restored before it is used.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.direct import (
    CHUNK_BYTES,
    PAGE,
    DirectReader,
    aligned_buffer,
    as_memory,
    copy_bytes,
    digest,
)
from megatrain.disk.manifest import Manifest, read_manifest
from megatrain.disk.parts import Parts
from megatrain.disk.safetensors_format import TensorEntry, parse_header
from megatrain.disk.weights_file import WeightsFile
from megatrain.errors import CheckpointDamaged, CheckpointMismatch, DiskError, WeightsFormatError
from megatrain.progress import Advance, byte_progress

NUM_WORKERS = 4
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


def verify(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint of which every byte is right.

    Raises CheckpointDamaged, CheckpointMismatch or DiskError.
    """
    manifest = read_manifest(folder)
    _read_all(folder, manifest, {}, "verifying")
    return manifest


def restore(folder: Path, manifest: Manifest, parts: Parts) -> None:
    """Fill the tensors of `parts` from a checkpoint.

    Raises CheckpointDamaged, CheckpointMismatch or DiskError.
    """
    files = {file.name: file for files in parts.blocks for file in files}
    if manifest.model != parts.model:
        raise CheckpointMismatch(
            f"{folder}: is of another model, or other params were frozen, or model.dtype was "
            "another. Resume with the model and settings it was saved with."
        )
    for name, file in files.items():
        record = manifest.files.get(name)
        if record is None or record.num_bytes != file.num_bytes:
            raise CheckpointDamaged(f"{folder / name}: is not as the manifest's model has it")
    takes = {name: _filling(file) for name, file in files.items()}
    _read_all(folder, manifest, takes, "resuming")


def _filling(file: WeightsFile) -> Take:
    """Return what puts a file's chunks into its tensors."""
    header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
    places = [(0, header.clone(), True)]
    places += [(start, tensor.memory, False) for start, tensor in file.placed()]

    def take(start: int, data: Tensor) -> None:
        stop = start + len(data)
        for first, memory, is_header in places:
            begin, end = max(start, first), min(stop, first + len(memory))
            if begin >= end:
                continue
            found, there = data[begin - start : end - start], memory[begin - first : end - first]
            if not is_header:
                copy_bytes(there, found)
            elif not torch.equal(there, found):
                raise CheckpointMismatch(f"{file.name}: its tensors are not those of this model")

    return take


def _read_all(folder: Path, manifest: Manifest, takes: dict[str, Take], title: str) -> None:
    """Read and check all files, on all workers; raises for the first that is not right."""
    with ExitStack() as stack:
        advance = stack.enter_context(byte_progress(f"{title} {folder.name}", manifest.num_bytes))
        chunks: list[_Chunk] = []
        for name, record in sorted(manifest.files.items()):
            reader = stack.enter_context(_opened(folder, name, record.num_bytes))
            for number, expected in enumerate(record.digests):
                start = number * CHUNK_BYTES
                stop = min(start + CHUNK_BYTES, record.num_bytes)
                chunk = _Chunk(
                    reader=reader,
                    name=name,
                    start=start,
                    stop=stop,
                    expected=expected,
                    take=takes.get(name),
                )
                chunks.append(chunk)
        _run(chunks, advance)


def _opened(folder: Path, name: str, num_bytes: int) -> DirectReader:
    try:
        reader = DirectReader(folder / name)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{folder / name}: is missing") from None
    if reader.num_bytes != num_bytes:
        reader.close()
        raise CheckpointDamaged(
            f"{folder / name}: has {reader.num_bytes} bytes, {num_bytes} were written"
        )
    return reader


def _run(chunks: Iterable[_Chunk], advance: Advance) -> None:
    buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for _ in range(NUM_WORKERS):
        buffers.put(aligned_buffer(CHUNK_BYTES + 2 * PAGE))

    def work(chunk: _Chunk) -> None:
        buffer = buffers.get()
        try:
            data = chunk.reader.read(chunk.start, chunk.stop, buffer)
            if digest(as_memory(data)) != chunk.expected:
                raise _damaged(chunk)
            if chunk.take is not None:
                chunk.take(chunk.start, data)
        finally:
            buffers.put(buffer)
        advance(chunk.stop - chunk.start)

    with ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="restore") as pool:
        futures = [pool.submit(work, chunk) for chunk in chunks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _damaged(chunk: _Chunk) -> CheckpointDamaged:
    """Return the error that names the tensors in a chunk, as far as the header can be read."""
    where = f"{chunk.reader.path}: bytes {chunk.start} to {chunk.stop} are not what was written"
    names = [
        entry.name
        for entry in _entries(chunk.reader)
        if entry.start < chunk.stop and entry.stop > chunk.start
    ]
    if not names:
        return CheckpointDamaged(where)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return CheckpointDamaged(f"{where} (in {shown})")


def _entries(reader: DirectReader) -> list[TensorEntry]:
    buffer = aligned_buffer(CHUNK_BYTES + 2 * PAGE)
    try:
        length = int.from_bytes(as_memory(reader.read(0, 8, buffer)), "little")
        if not 2 <= length <= CHUNK_BYTES - 8:
            return []
        header = bytes(as_memory(reader.read(8, 8 + length, buffer)))
        return parse_header(header, reader.num_bytes - 8 - length, reader.path.name)
    except (DiskError, WeightsFormatError):
        return []
