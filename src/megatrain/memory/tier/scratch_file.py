"""The disk tier: master remainders and optimizer states in a scratch file.

    file      | region of block 0 | region of block 1 | ...
    region    | lo | m | v |               one part for each kind on disk, each on a page boundary

A region in memory has the same bytes at the same offsets: a step reads it into a buffer, updates
it there and writes it back. A part has the bytes of the block in an arena of its kind, padding
included. Bytes are hashed on the way to the disk and compared on the way back; the hashes are in
memory. A part that was never written reads as zeros, without a visit to the disk.

The file is scratch. It loses its name as soon as it is open, so no crash leaves it behind, and
nothing in it outlives the process: a run resumes from its last checkpoint.

Who waits: `read` and `write` return when all bytes have moved, over several threads at once. Calls
for different blocks, and several reads of one block, may overlap. A write of a block excludes every
other call for the same kinds of it; the schedule sees to that, and the gate of a snapshot: it must
count an update only when the block is back in the file, because a save reads it from there.

Laws (tests/memory/tier/test_scratch_file.py, test_regions.py)
    1. A part reads as it was last written, or as zeros.
    2. A byte that changed on the disk is an error, never a number.
    3. Every failed call is a DiskError that names the file and what remains: the last checkpoint.
    4. A file that was not made, or a process that was killed, leaves no bytes on the disk.
    5. Parts never overlap, and each starts on a page, so that direct I/O can move any of them.
    6. A region has the bytes of its block in the tiered kinds, each rounded up to a page.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatrain import files
from megatrain.errors import DiskError, DiskFull, ScratchFileCorrupted
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import as_memory, digest
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import PAGE, Extent, Layout, Place, Segment
from megatrain.memory.ledger import gib

TIER_CHUNK_BYTES = 4 << 20
"""The size of one call to the system, and of the data of one hash."""
TIER_THREADS = 8
"""Hashing takes part of their time: fewer would leave a fast disk idle."""
_READ_AHEAD = 4
_NAME = "megatrain-scratch"
_WAY_OUT = (
    "The disk tier holds scratch data only: the last checkpoint is complete, and `--resume` "
    "continues from it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """The folder where a tier may be made, and the kinds that go there."""

    folder: Path
    kinds: tuple[TensorKind, ...]

    def open(self, layout: Layout) -> Tier:
        """Return the tier of a layout. Raises DiskFull or DiskError."""
        return Tier(self.folder, TierRegions(layout, self.kinds))


class TierRegions:
    """The scratch file of a layout. It allocates nothing."""

    def __init__(self, layout: Layout, kinds: tuple[TensorKind, ...]) -> None:
        """`kinds` are those on disk, of the kinds of the layout."""
        self.kinds = kinds
        self._layout = layout
        self._parts: dict[tuple[int, TensorKind], Extent] = {}
        self._starts: list[int] = []
        start = 0
        for block in range(layout.num_blocks):
            self._starts.append(start)
            begin = 0
            for kind in kinds:
                end = begin + _pages(layout.block_extents[block, kind].num_bytes)
                self._parts[block, kind] = Extent(kind=kind, start=begin, stop=end)
                begin = end
            start += begin
        self._starts.append(start)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._starts[-1]

    def start(self, block: int) -> int:
        """Return the first byte of a block's region in the file."""
        return self._starts[block]

    def region_bytes(self, block: int) -> int:
        """Return the size of a block's region; 0 if nothing of it is on disk."""
        return self._starts[block + 1] - self._starts[block]

    def part(self, block: int, kind: TensorKind) -> Extent:
        """Return the bytes of `kind` in the region of `block`, whole pages."""
        return self._parts[block, kind]

    def parts(
        self, block: int, region: Tensor, kinds: Iterable[TensorKind] | None = None
    ) -> dict[TensorKind, Tensor]:
        """Return the parts in `region`, the bytes of a block's region in memory or more."""
        extents = [self.part(block, kind) for kind in (self.kinds if kinds is None else kinds)]
        return {extent.kind: region[extent.start : extent.stop] for extent in extents}

    def numbers(self, where: Segment | Place, kind: TensorKind) -> Extent:
        """Return where the numbers of a segment or a param are in the region of its block."""
        block = where.block if isinstance(where, Segment) else where.segment.block
        extent = where.extent(kind)
        offset = self.part(block, kind).start - self._layout.block_extents[block, kind].start
        return Extent(kind=kind, start=extent.start + offset, stop=extent.stop + offset)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


class Tier:
    """The scratch file of one store."""

    def __init__(self, folder: Path, regions: TierRegions) -> None:
        """Make the file in `folder` and reserve its bytes. Raises DiskFull or DiskError."""
        self.regions = regions
        self.folder = folder
        self._digests: dict[tuple[int, TensorKind, int], str] = {}
        """Digests of written chunks, by block, kind and number of the chunk."""
        self._fd, self._direct = _scratch_file(folder, regions.num_bytes)
        self._pool = ThreadPoolExecutor(TIER_THREADS, thread_name_prefix="tier")

    def read(self, block: int, parts: Mapping[TensorKind, Tensor]) -> int:
        """Fill `parts` (TierRegions.parts) with the block's bytes; return their number.

        Raises ScratchFileCorrupted or DiskError.
        """
        return self._over_chunks(block, parts, self.get)

    def write(self, block: int, parts: Mapping[TensorKind, Tensor]) -> int:
        """Write `parts` of a block, whole pages in page-aligned memory; return their bytes.

        Raises DiskError.
        """
        return self._over_chunks(block, parts, self.put)

    def chunks(
        self, block: int, kind: TensorKind, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """Yield number, first and last byte of each chunk that has bytes of [start, stop)."""
        end, size = self.regions.part(block, kind).num_bytes, TIER_CHUNK_BYTES
        stop = end if stop is None else stop
        for number in range(start // size, -(-stop // size)):
            yield number, number * size, min((number + 1) * size, end)

    def get(self, block: int, kind: TensorKind, chunk: int, buffer: Tensor) -> None:
        """Fill `buffer` with one chunk of a part. Raises ScratchFileCorrupted or DiskError."""
        expected = self._digests.get((block, kind, chunk))
        memory = as_memory(buffer)
        if expected is None:
            buffer.numpy().fill(0)
            return
        start, have = self._offset(block, kind, chunk), 0
        with self._explained("read"):
            while have < len(memory):
                count = files.read_at(self._fd, memory[have:], start + have)
                if count == 0:
                    raise DiskError(
                        f"the scratch file in {self.folder} ends at byte {start + have}; bytes up "
                        f"to {start + len(memory)} were expected"
                    )
                have += count
            if not self._direct:
                files.drop_cache(self._fd, start, len(memory))
        if digest(memory) != expected:
            raise ScratchFileCorrupted(
                f"the scratch file in {self.folder}: bytes {start} to {start + len(memory)} "
                f"({kind} of block {block}) are not those that were written. The disk or its cable "
                f"may be failing. {_WAY_OUT}"
            )

    def put(self, block: int, kind: TensorKind, chunk: int, buffer: Tensor) -> None:
        """Write one chunk of a part. Raises DiskError."""
        memory = as_memory(buffer)
        self._digests[block, kind, chunk] = digest(memory)
        with self._explained("write"):
            files.write_at(self._fd, memory, self._offset(block, kind, chunk))

    def pieces(self, block: int, kind: TensorKind, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the bytes [start, stop) of a part, in order and in pieces, reading ahead.

        Each piece has its own memory. Raises ScratchFileCorrupted or DiskError.
        """
        pending: deque[tuple[Tensor, slice, Future[None]]] = deque()
        for number, first, last in self.chunks(block, kind, start, stop):
            buffer = aligned_buffer(last - first)
            future = self._pool.submit(self.get, block, kind, number, buffer[: last - first])
            pending.append((buffer, slice(max(start - first, 0), min(stop, last) - first), future))
            if len(pending) > _READ_AHEAD:
                yield _arrived(*pending.popleft())
        while pending:
            yield _arrived(*pending.popleft())

    def close(self) -> None:
        """Let go of the file, and with it of its bytes."""
        self._pool.shutdown(wait=True)
        files.close(self._fd)

    def _offset(self, block: int, kind: TensorKind, chunk: int) -> int:
        start = self.regions.start(block) + self.regions.part(block, kind).start
        return start + chunk * TIER_CHUNK_BYTES

    def _over_chunks(
        self,
        block: int,
        parts: Mapping[TensorKind, Tensor],
        move: Callable[[int, TensorKind, int, Tensor], None],
    ) -> int:
        """Move all chunks; returns when no thread works on the parts any more, also on failure."""
        futures: list[Future[None]] = []
        for kind, part in parts.items():
            for number, start, stop in self.chunks(block, kind):
                futures.append(self._pool.submit(move, block, kind, number, part[start:stop]))
        wait(futures)
        for future in futures:
            future.result()
        return sum(part.nbytes for part in parts.values())

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Turn a failed call into an error that names the file and the way out."""
        try:
            with files.explained(action, self.folder / _NAME):
                yield
        except DiskError as error:
            raise type(error)(f"{error}. {_WAY_OUT}") from error


def _arrived(buffer: Tensor, span: slice, future: Future[None]) -> Tensor:
    future.result()
    return buffer[span]


def _scratch_file(folder: Path, num_bytes: int) -> tuple[int, bool]:
    """Return a new file without a name, its bytes reserved, and whether it is past the cache."""
    path = files.temporary_name(folder / _NAME)
    try:
        with files.explained("create", path):
            fd, direct = files.open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileNotFoundError as error:
        raise DiskError(f"memory.disk: the folder {folder} does not exist") from error
    try:
        files.remove(path)
        with files.explained("reserve space in", folder):
            files.reserve(fd, num_bytes)
    except BaseException as error:
        files.close(fd)
        with suppress(DiskError):  # the first failure is the one to report
            files.remove(path)
        if isinstance(error, DiskFull):
            raise DiskFull(
                f"memory.disk: {folder} has no room for {gib(num_bytes)} of scratch data. Free "
                "space, or set memory.disk to a folder on a larger disk."
            ) from error
        raise
    return fd, direct
