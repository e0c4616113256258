"""Where each param sits: every byte of the store as (block, kind, byte range).

A kind is one arena. Inside it blocks follow each other, each on a page boundary, so that a block
can be registered with a device, written with direct I/O, moved to a disk, or divided among ranks.

    arena `hi`   | block 0: segment, segment | block 1: segment | ...
    segment      | param | pad | param | pad | ...      one dtype, all trained or all frozen

Inside a block params of equal dtype form a *segment*, and a param has the same element offset in
every kind of its segment. One pass over a segment therefore updates all of its params, with plain
pointers: hi[i], lo[i], m[i], v[i], grad[i] belong together for every i. Padding holds zeros, and an
update of zeros by zero gradients leaves zeros.

Laws (tests/memory/test_layout.py)
    1. Params never overlap, in any kind; each starts on ALIGN elements, each block on PAGE bytes.
    2. Frozen params have weights only; fp32 params have no `lo`.
    3. The bytes of a kind are known before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatrain.models.decoder import Block, Param

PAGE = 4096
ALIGN = 128
"""Elements. 256 bytes in bf16: what a device wants of a matrix, and whole cache lines."""


class Kind(StrEnum):
    """What a byte of the store is for."""

    HI = "hi"
    """Weights as compute sees them: bf16, or fp32 where a param is fp32."""
    LO = "lo"
    """The other 16 bits of the fp32 master of a bf16 weight."""
    M = "m"
    V = "v"
    GRAD = "grad"
    """Gradients that wait for the global norm, in the dtype of the weights."""


def kind_dtype(kind: Kind, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of `kind` for a param of `param_dtype`."""
    if kind in (Kind.HI, Kind.GRAD):
        return param_dtype
    return torch.int16 if kind is Kind.LO else torch.float32


def has_kind(kind: Kind, dtype: torch.dtype, trained: bool) -> bool:
    """Return whether a param of this dtype has bytes of `kind` at all."""
    if kind is Kind.HI:
        return True
    return trained and not (kind is Kind.LO and dtype is torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A byte range of one arena."""

    kind: Kind
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of params of one block with one dtype, addressed alike in every kind."""

    block: int
    dtype: torch.dtype
    trained: bool
    num_elements: int
    """Padding included."""
    starts: dict[Kind, int]
    """Its first byte in the arena of each kind that it has."""

    def extent(self, kind: Kind) -> Extent:
        """Return its bytes in the arena of `kind`."""
        start = self.starts[kind]
        size = self.num_elements * kind_dtype(kind, self.dtype).itemsize
        return Extent(kind=kind, start=start, stop=start + size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a param sits in its segment."""

    param: Param
    segment: Segment
    start: int
    """In elements, from the start of the segment."""

    def extent(self, kind: Kind) -> Extent:
        """Return the param's bytes in the arena of `kind`, without padding."""
        size = kind_dtype(kind, self.param.dtype).itemsize
        start = self.segment.starts[kind] + self.start * size
        return Extent(kind=kind, start=start, stop=start + self.param.num_elements * size)

    @property
    def padded_stop(self) -> int:
        """Where the next param may start, in elements."""
        return self.start + _round_up(self.param.num_elements, ALIGN)

    def has(self, kind: Kind) -> bool:
        """Return whether the param has bytes of `kind`."""
        return kind in self.segment.starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The places of all params. Immutable, and the same for the same blocks on any machine."""

    num_blocks: int
    segments: tuple[Segment, ...]
    places: dict[str, Place]
    """By the param's name."""
    block_extents: dict[tuple[int, Kind], Extent]
    kind_bytes: dict[Kind, int]
    """The exact size of each arena."""

    def block_places(self, block: int) -> list[Place]:
        """Return the places of a block's params."""
        return [place for place in self.places.values() if place.segment.block == block]

    def segment_places(self, segment: Segment) -> list[Place]:
        """Return the places of a segment's params, in order."""
        return [place for place in self.places.values() if place.segment is segment]

    def trained_segments(self, block: int) -> list[Segment]:
        """Return the segments of a block that get gradients."""
        return [s for s in self.segments if s.block == block and s.trained]

    def block_params(self, block: int, kind: Kind, buffer: Tensor) -> dict[str, Tensor]:
        """Return the params of a block as views into `buffer`, a copy of its bytes in `kind`."""
        origin = self.block_extents[block, kind].start
        views = {}
        for place in self.block_places(block):
            extent = place.extent(kind)
            flat = buffer[extent.start - origin : extent.stop - origin]
            views[place.param.name] = flat.view(kind_dtype(kind, place.param.dtype)).view(
                place.param.shape
            )
        return views

    @property
    def num_params(self) -> int:
        """Scalars, padding not counted."""
        return sum(place.param.num_elements for place in self.places.values())


def build_layout(blocks: Iterable[Block]) -> Layout:
    """Return the layout of `blocks`: params in their given order, bf16 before fp32, frozen last."""
    blocks = tuple(blocks)
    ends = dict.fromkeys(Kind, 0)
    segments: list[Segment] = []
    places: dict[str, Place] = {}
    extents: dict[tuple[int, Kind], Extent] = {}
    for block in blocks:
        begins = {kind: _round_up(end, PAGE) for kind, end in ends.items()}
        ends = dict(begins)
        for dtype, trained in _segment_keys(block):
            params = [p for p in block.params if (p.dtype, p.trained) == (dtype, trained)]
            starts, num_elements = [], 0
            for param in params:
                starts.append(num_elements)
                num_elements += _round_up(param.num_elements, ALIGN)
            kinds = [kind for kind in Kind if has_kind(kind, dtype, trained)]
            segment = Segment(
                block=block.index,
                dtype=dtype,
                trained=trained,
                num_elements=num_elements,
                starts={kind: ends[kind] for kind in kinds},
            )
            segments.append(segment)
            for param, start in zip(params, starts, strict=True):
                places[param.name] = Place(param=param, segment=segment, start=start)
            for kind in kinds:
                ends[kind] = segment.extent(kind).stop
        for kind in Kind:
            extents[block.index, kind] = Extent(kind=kind, start=begins[kind], stop=ends[kind])
    return Layout(
        num_blocks=len(blocks),
        segments=tuple(segments),
        places=places,
        block_extents=extents,
        kind_bytes={kind: _round_up(end, PAGE) for kind, end in ends.items()},
    )


def _segment_keys(block: Block) -> list[tuple[torch.dtype, bool]]:
    order = [
        (dtype, trained) for trained in (True, False) for dtype in (torch.bfloat16, torch.float32)
    ]
    present = {(param.dtype, param.trained) for param in block.params}
    return [key for key in order if key in present]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
