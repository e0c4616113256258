"""The anchor: the weights that all peers have in common, and the outer optimizer that moves them.

    ANCHOR/00007.bin    a piece: fp32 weights, and the outer momentum, as of exchange N
    ANCHOR/00007.err    what this peer has not sent of the piece
    ANCHOR/next/        the exchange that is under way: its difference, and what it leaves unsent

Pieces are runs of at most PIECE elements of a trained segment of the store. A piece is replaced as
a whole, by a rename, and says which exchange it has had: a process that dies in the middle of an
exchange finds old pieces and new ones, and takes the old ones further. Once a round each piece is
read and written; in between nothing of it needs memory.

The outer step is SGD with Nesterov's momentum, as torch.optim.SGD has it, on the mean difference of
the anchor from the weights of the peers. It is computed in fp64 from the mean of the weights,

    anchor = (1 - r) anchor + r mean - rate momentum^2 buffer       r = rate (1 + momentum)

without the terms whose factor is 0: at rate 1 and momentum 0 the anchor becomes the mean itself,
and the mean of one peer is its weights, to the bit. Each operation is rounded as IEEE has it, and
peers are added up in the order of their names: all peers get the same bits, on any machine.

Laws (tests/peers/test_anchor.py)
    1. With rate 1, momentum 0 and one peer the anchor is the weights of the peer, in every bit.
    2. Anchors are those of torch.optim.SGD over the same differences within 1e-6.
    3. After a failure at any file call the anchor can be taken to the bits that it would have had.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatrain import files
from megatrain.errors import DiskError, PeersError
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import Layout, Segment
from megatrain.memory.master import join, split_into
from megatrain.memory.store import Store
from megatrain.peers.compression import Compression, Floats, Sent

Doubles = NDArray[np.float64]
PIECE = 1 << 22
"""Most elements of a piece: 16 MiB of weights. Several are in work at the same time."""
_IN_CACHE = 1 << 16
"""Elements that are in work at a time."""
_HEAD = struct.Struct("<8sQQ32s32s")
_MAGIC = b"anchor 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of elements of a trained segment."""

    number: int
    part: int
    """The part of the model that it is shared with."""
    segment: Segment
    span: slice

    @property
    def num_elements(self) -> int:
        return int(self.span.stop - self.span.start)


def pieces_of(layout: Layout, num_parts: int = 1) -> tuple[Piece, ...]:
    """Return the pieces of all trained params, in the order of the store.

    Blocks are dealt out to parts of about equal size, the largest first.
    """
    segments = [segment for segment in layout.segments if segment.trained]
    sizes: dict[int, int] = {}
    for segment in segments:
        sizes[segment.block] = sizes.get(segment.block, 0) + segment.num_elements
    part_of, filled = {}, [0] * num_parts
    for block in sorted(sizes, key=lambda block: (-sizes[block], block)):
        part_of[block] = filled.index(min(filled))
        filled[part_of[block]] += sizes[block]
    spans = [
        (segment, slice(start, min(start + PIECE, segment.num_elements)))
        for segment in segments
        for start in range(0, segment.num_elements, PIECE)
    ]
    return tuple(
        Piece(number=number, part=part_of[segment.block], segment=segment, span=span)
        for number, (segment, span) in enumerate(spans)
    )


def layout_mark(layout: Layout) -> str:
    """Return a hash of the names, shapes and places of all trained params."""
    found = hashlib.sha256()
    for name, place in layout.places.items():
        if place.segment.trained:
            segment = place.segment
            what = (name, place.param.shape, segment.block, place.start, segment.num_elements)
            found.update(repr(what).encode())
    return found.hexdigest()


class Masters:
    """The fp32 masters in a store, piece by piece. No update may be pending."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, piece: Piece) -> Floats:
        """Return a copy of a piece's masters."""
        segment, store = piece.segment, self._store
        hi = store.segment(segment, Kind.HI)[piece.span]
        if segment.dtype is torch.float32:
            return hi.numpy().copy()
        region = store.region(segment.block, Kind.LO)
        found: Floats = join(hi, store.segment(segment, Kind.LO, region)[piece.span]).numpy()
        return found

    def write(self, piece: Piece, values: Floats) -> None:
        """Make `values` the masters of a piece, and of its weights."""
        segment, store = piece.segment, self._store
        hi, master = store.segment(segment, Kind.HI)[piece.span], torch.from_numpy(values)
        if segment.dtype is torch.float32:
            hi.copy_(master)
            return
        with store.changing(segment.block, Kind.LO) as region:
            split_into(master, hi, store.segment(segment, Kind.LO, region)[piece.span])

    def add(self, piece: Piece, change: Floats) -> None:
        """Add to the masters of a piece, as fast as memory is read and written."""
        segment, store = piece.segment, self._store
        hi, added = store.segment(segment, Kind.HI)[piece.span], torch.from_numpy(change)
        if segment.dtype is torch.float32:
            hi += added
            return
        with store.changing(segment.block, Kind.LO) as region:
            lo = store.segment(segment, Kind.LO, region)[piece.span]
            in_cache = (torch.split(one, 4 * _IN_CACHE) for one in (hi, lo, added))
            for some_hi, some_lo, some_added in zip(*in_cache, strict=True):
                split_into(join(some_hi, some_lo).add_(some_added), some_hi, some_lo)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """The outer optimizer."""

    rate: float
    momentum: float

    def __call__(
        self, anchor: Floats, buffer: Floats | None, sent: Sequence[Sent]
    ) -> tuple[Floats, Floats | None]:
        """Return the anchor and the momentum after an exchange, from what peers have sent."""
        mean = sent[0].alone(len(anchor))
        for one in sent[1:]:
            one.add_to(mean)
        mean /= len(sent)
        moved, kept = np.empty_like(anchor), None if buffer is None else np.empty_like(buffer)
        for start in range(0, len(anchor), _IN_CACHE):
            some = slice(start, start + _IN_CACHE)
            here = mean[some] if sent[0].are_weights else anchor[some] - mean[some]
            old = None if buffer is None else buffer[some]
            moved[some], new = self._moved(anchor[some], old, here)
            if kept is not None:
                kept[some] = new
        return moved, kept

    def _moved(
        self, anchor: Floats, buffer: Floats | None, mean: Doubles
    ) -> tuple[Doubles, Doubles | None]:
        share = self.rate * (1 + self.momentum)
        moved = mean if share == 1 else share * mean
        if share != 1:
            moved = moved + (1 - share) * anchor.astype(np.float64)
        if buffer is None:
            return moved, None
        old = buffer.astype(np.float64)
        moved = moved - (self.rate * self.momentum**2) * old
        return moved, self.momentum * old + (anchor - mean)


class Anchor:
    """The anchor of one peer, in a folder."""

    def __init__(
        self,
        folder: Path,
        pieces: Sequence[Piece],
        compression: Compression,
        step: OuterStep,
    ) -> None:
        self.folder = folder
        self.pieces = tuple(pieces)
        self.compression = compression
        self._step = step
        self._heads: dict[int, _Head] = {}

    @property
    def exists(self) -> bool:
        """Whether all pieces are there."""
        try:
            return all(self.head(piece) for piece in self.pieces)
        except PeersError:
            return False

    @property
    def digest(self) -> str:
        """A hash of all pieces, by which peers know that they have the same anchor."""
        found = hashlib.sha256()
        for piece in self.pieces:
            found.update(self.head(piece)[1].encode())
        return found.hexdigest()

    def head(self, piece: Piece) -> tuple[int, str]:
        """Return which exchange a piece has had last, and the hash of its numbers."""
        head = self._head(piece)
        return head.number, head.digest

    def _head(self, piece: Piece) -> _Head:
        if piece.number not in self._heads:
            path = self._path(piece)
            try:
                with path.open("rb") as file:
                    head = file.read(_HEAD.size)
                magic, number, size, *digests = _HEAD.unpack(head)
            except (OSError, struct.error) as error:
                raise PeersError(f"{path} cannot be read: {error}") from None
            if magic != _MAGIC or size != piece.num_elements:
                raise PeersError(f"{path} is not a piece of the anchor of this model")
            self._heads[piece.number] = _Head(number, *digests)
        return self._heads[piece.number]

    def begin(self, masters: Masters) -> None:
        """Make the weights in memory the anchor before the first exchange."""
        files.make_folder(self.folder)
        for piece in self.pieces:
            values = masters.read(piece)
            self._write(piece, 0, values, np.zeros_like(values) if self._step.momentum else None)

    def read(self, piece: Piece) -> tuple[Floats, Floats | None]:
        """Return the weights and the momentum of a piece. Raises PeersError if it is damaged."""
        has_momentum = bool(self._step.momentum)
        numbers = self._read(piece, 2 if has_momentum else 1)
        weights, momentum = numbers[: piece.num_elements], numbers[piece.num_elements :]
        if has_momentum and _hash(momentum) != self._head(piece).momentum:
            raise self._damaged(piece)
        return weights, momentum if has_momentum else None

    def weights(self, piece: Piece) -> Floats:
        """Return the weights of a piece alone. Raises PeersError if they are damaged."""
        return self._read(piece, 1)

    def _read(self, piece: Piece, times: int) -> Floats:
        size = piece.num_elements
        with self._path(piece).open("rb") as file:
            file.seek(_HEAD.size)
            numbers: Floats = np.fromfile(file, "<f4", times * size)
        if len(numbers) != times * size or _hash(numbers[:size]) != self._head(piece).weights:
            raise self._damaged(piece)
        return numbers

    def _damaged(self, piece: Piece) -> PeersError:
        return PeersError(
            f"{self._path(piece)}: the bytes of this piece of the anchor have changed"
        )

    def error(self, piece: Piece) -> Floats | None:
        """Return what this peer has not sent of a piece."""
        if not self.compression.keeps_error:
            return None
        with suppress(FileNotFoundError):
            found: Floats = np.fromfile(self._error_path(piece), "<f4")
            if len(found) == piece.num_elements:
                return found
        return np.zeros(piece.num_elements, np.float32)

    def leave(self, piece: Piece, error: Floats) -> None:
        """Keep what will be left of a piece if its difference enters the exchange."""
        files.make_folder(self.next)
        files.write_file(self.next / self._error_path(piece).name, error.tobytes(), durable=False)

    def move(self, piece: Piece, number: int, sent: Sequence[Sent]) -> Floats:
        """Take a piece through an exchange, unless it has had it; return its weights then."""
        anchor, buffer = self.read(piece)
        if self.head(piece)[0] < number:
            if sent:
                anchor, buffer = self._step(anchor, buffer, sent)
            self._write(piece, number, anchor, buffer)
        return anchor

    def keep_errors(self, pieces: Sequence[Piece]) -> None:
        """Let what an exchange leaves unsent count: its difference has entered."""
        for piece in pieces:
            path = self.next / self._error_path(piece).name
            if path.exists():
                files.rename(path, self._error_path(piece))

    @property
    def next(self) -> Path:
        """The folder of the exchange that is under way."""
        return self.folder / "next"

    def objects(self) -> Iterator[tuple[str, Path]]:
        """Yield the pieces as files, with a name of each that has its hash."""
        for piece in self.pieces:
            yield f"{piece.number:05}-{self.head(piece)[1][:32]}", self._path(piece)

    def adopt(self, piece: Piece, data: bytes) -> None:
        """Take over a piece that another peer has written. Raises PeersError."""
        self._heads.pop(piece.number, None)
        files.make_folder(self.folder)
        files.write_file(self._path(piece), data)
        self.read(piece)

    def forget_errors(self) -> None:
        """Let go of all that was not sent, and of an exchange that was under way."""
        files.remove_folder(self.next)
        for piece in self.pieces:
            files.remove(self._error_path(piece))

    def _write(self, piece: Piece, number: int, anchor: Floats, buffer: Floats | None) -> None:
        if not (np.isfinite(anchor).all() and (buffer is None or np.isfinite(buffer).all())):
            raise PeersError(
                f"exchange {number}: piece {piece.number} of the anchor would not be finite"
            )
        parts = [one.astype("<f4", copy=False) for one in (anchor, buffer) if one is not None]
        head = _Head(number, *map(_hash, parts))
        packed = _HEAD.pack(_MAGIC, number, piece.num_elements, head.weights, head.momentum)
        try:
            files.write_file(self._path(piece), b"".join([packed, *(one.data for one in parts)]))
        except DiskError:
            self._heads.pop(piece.number, None)
            raise
        self._heads[piece.number] = head

    def _path(self, piece: Piece) -> Path:
        return self.folder / f"{piece.number:05}.bin"

    def _error_path(self, piece: Piece) -> Path:
        return self.folder / f"{piece.number:05}.err"


class _Head(NamedTuple):
    """What the file of a piece says of it."""

    number: int
    weights: bytes
    """Hash of the weights."""
    momentum: bytes = bytes(32)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.weights + self.momentum).hexdigest()


def _hash(numbers: Floats) -> bytes:
    return hashlib.sha256(numbers.astype("<f4", copy=False).data).digest()
