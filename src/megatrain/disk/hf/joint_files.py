"""Files that ranks write together: each by one of them, which gets the parts of the others.

    a tensor of the file   | rank 0 | rank 1 | rank 2 |     their parts, one behind the other
    rank 1 --> its parts of all tensors, in the order of the file, cut into chunks -->  writer

The bytes are those that one process would write. A process alone writes what it has.

Who waits: a rank that does not write returns when the writer has all that it sends; the writer,
when all bytes are in its queue's buffers. A rank that fails continues to send and to receive, now
bytes without meaning, so that none waits for it: `failure` says so, and all ranks settle on it
(ranks/agreement.py) before the file is used. Only RankLost is raised at once.

Laws (tests/disk/hf/test_export_ranks.py, tests/disk/checkpoint/test_save_ranks.py)
    1. A file has the bytes that one process writes, whichever rank writes it.
    2. Whatever fails on a rank, the calls of the others return.
    3. Memory grows by STREAM_BYTES, and by what the queue of the writer has not yet copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatrain.disk.hf.weights_file import NamedTensor, WeightsFile
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import DirectWriter, WriteQueue, copy_bytes
from megatrain.progress import Advance
from megatrain.ranks.ranks import Carrier, Ranks

Attempted = TypeVar("Attempted")
STREAM_BYTES = 8 << 20
"""Bytes of all chunks that a writer takes from, one of each other rank."""


class JointFiles:
    """One rank's side of files that all ranks write in the same order."""

    def __init__(self, ranks: Ranks, queue: WriteQueue, advance: Advance) -> None:
        self._owner, self._carrier = ranks.owner, ranks.carrier
        self._queue, self._advance = queue, advance
        self._chunk_bytes = max(4096, STREAM_BYTES // self._owner.size)
        self.failure: Exception | None = None
        """The first on this rank. From then on it writes nothing."""

    def attempt(self, work: Callable[[], Attempted]) -> Attempted | None:
        """Do `work`, unless something failed before; take note if it fails."""
        if self.failure is None:
            try:
                return work()
            except Exception as failure:
                self.failure = failure
        return None

    def write(self, file: WeightsFile, path: Path, rank: int) -> DirectWriter | None:
        """Let `rank` write a new file; the tensors may change as soon as this returns.

        Returns the writer, whose file is for the caller to finish, if this rank has written it.
        """
        if rank != self._owner.rank:
            self._send(file, rank)
            return None
        writer = self.attempt(lambda: DirectWriter(path, file.num_bytes, self._queue))
        try:
            self._fill(file, writer)
            if writer is not None:
                self.attempt(writer.let_go)
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        if writer is not None and self.failure is not None:
            writer.abandon()
            return None
        return writer

    def _fill(self, file: WeightsFile, writer: DirectWriter | None) -> None:
        """Give a writer the parts of all ranks; without one they come all the same."""

        def put(piece: Tensor) -> None:
            if writer is not None:
                self.attempt(lambda: writer.write(piece))
            self._advance(len(piece))

        put(torch.frombuffer(bytearray(file.header), dtype=torch.uint8))
        others = [rank for rank in range(self._owner.size) if rank != self._owner.rank]
        streams = {
            rank: _Incoming(self._carrier, rank, _sent_bytes(file, rank), self._chunk_bytes)
            for rank in others
        }
        for tensor in file.tensors:
            for rank in range(self._owner.size):
                if rank in streams:
                    pieces = streams[rank].take(tensor.part_bytes(rank))
                else:
                    pieces = self._own(tensor)
                for piece in pieces:
                    put(piece)

    def _send(self, file: WeightsFile, rank: int) -> None:
        stream = _Outgoing(
            self._carrier, rank, _sent_bytes(file, self._owner.rank), self._chunk_bytes
        )
        for tensor in file.tensors:
            for piece in self._own(tensor):
                stream.put(piece)
        stream.fill_up()

    def _own(self, tensor: NamedTensor) -> Iterator[Tensor]:
        """Yield what this rank gives of a tensor, until something fails."""
        if tensor.part_bytes(self._owner.rank) == 0:
            return
        pieces = self.attempt(tensor.pieces)
        while pieces is not None:
            piece = self.attempt(lambda: next(pieces, None))
            if piece is None:
                return
            yield piece


def _sent_bytes(file: WeightsFile, rank: int) -> int:
    return sum(tensor.part_bytes(rank) for tensor in file.tensors)


class _Outgoing:
    """A rank's part of a file, sent in chunks of equal size, of which the last may be shorter."""

    def __init__(self, carrier: Carrier, rank: int, num_bytes: int, chunk_bytes: int) -> None:
        self._carrier, self._rank, self._left = carrier, rank, num_bytes
        self._chunk = aligned_buffer(chunk_bytes)[:chunk_bytes]
        self._used = 0

    def put(self, piece: Tensor) -> None:
        while len(piece):
            count = min(len(piece), len(self._chunk) - self._used)
            copy_bytes(self._chunk[self._used : self._used + count], piece[:count])
            self._use(count)
            piece = piece[count:]

    def fill_up(self) -> None:
        """Send what is left of the announced bytes; it has no meaning if there are any."""
        while self._left:
            self._use(min(self._left, len(self._chunk) - self._used))

    def _use(self, count: int) -> None:
        self._used += count
        self._left -= count
        if self._used == len(self._chunk) or not self._left:
            self._carrier.send(self._chunk[: self._used], self._rank)
            self._used = 0


class _Incoming:
    """Another rank's part of a file, received in pieces as they are asked for.

    Each chunk has its own memory, because the writer's queue copies pieces when it gets to them.
    """

    def __init__(self, carrier: Carrier, rank: int, num_bytes: int, chunk_bytes: int) -> None:
        self._carrier, self._rank, self._left = carrier, rank, num_bytes
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Iterator[Tensor]:
        """Yield the next bytes."""
        while num_bytes:
            if not len(self._chunk):
                size = min(self._left, self._chunk_bytes)
                self._chunk = aligned_buffer(size)[:size]
                self._carrier.receive(self._chunk, self._rank)
                self._left -= size
            piece = self._chunk[:num_bytes]
            self._chunk = self._chunk[len(piece) :]
            num_bytes -= len(piece)
            yield piece
