"""Where each param sits: every byte of the store as (block, kind, byte range).

A kind is one arena. Inside it blocks follow each other, each on a page boundary, so that a block
can be registered with a device, written with direct I/O, moved to a disk, or divided among ranks.

    arena `hi`   | block 0: segment, segment | block 1: segment | ...
    segment      | param | pad | param | pad | ...      one dtype, all trained or all frozen

Inside a block params of equal dtype form a *segment*, and a param has the same element offset in
every kind of its segment. One pass over a segment therefore updates all of its params, with plain
pointers: hi[i], lo[i], grad[i] and the optimizer's states at i belong together for every i. Padding
holds zeros, and an update of zeros by zero gradients leaves zeros.

Laws (tests/memory/test_layout.py)
    1. Params never overlap, in any kind; each starts on ALIGN elements, each block on PAGE bytes.
    2. Frozen params have weights only; fp32 params have no `lo`.
    3. The bytes of a kind are known before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.memory.kinds import Kind
from megatrain.models.decoder import Block, Param

PAGE = 4096
ALIGN = 256
"""Elements: full blocks of 8-bit states, the matrix alignment of devices, and full cache lines."""


def kind_dtype(kind: Kind, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of `kind` for a param of `param_dtype`, which has it."""
    name = kind.dtype(is_fp32=param_dtype is torch.float32)
    assert name is not None, (kind.name, param_dtype)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def has_kind(kind: Kind, dtype: torch.dtype, trained: bool) -> bool:
    """Return whether a param of this dtype has bytes of `kind` at all."""
    has_numbers = kind.dtype(is_fp32=dtype is torch.float32) is not None
    return has_numbers and (trained or kind.is_for_frozen)


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
        size = _num_bytes(kind, self.dtype, self.num_elements)
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
        dtype = self.param.dtype
        start = self.segment.starts[kind] + _num_bytes(kind, dtype, self.start)
        size = _num_bytes(kind, dtype, self.param.num_elements)
        return Extent(kind=kind, start=start, stop=start + size)

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
    kinds: tuple[Kind, ...]
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

    def first_trained(self, segment: Segment) -> int:
        """Return the number of a trained segment's first element, padding counted.

        It depends on the model alone, not on threads or ranks.
        """
        earlier = self.segments[: self.segments.index(segment)]
        return sum(other.num_elements for other in earlier if other.trained)

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


def build_layout(blocks: Iterable[Block], kinds: tuple[Kind, ...]) -> Layout:
    """Return the layout of `blocks` in `kinds`.

    Params keep their order, but bf16 comes before fp32, and frozen params come last.
    """
    blocks = tuple(blocks)
    assert all(ALIGN % kind.elements_per_number == 0 for kind in kinds), kinds
    ends = dict.fromkeys(kinds, 0)
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
            present = [kind for kind in kinds if has_kind(kind, dtype, trained)]
            segment = Segment(
                block=block.index,
                dtype=dtype,
                trained=trained,
                num_elements=num_elements,
                starts={kind: ends[kind] for kind in present},
            )
            segments.append(segment)
            for param, start in zip(params, starts, strict=True):
                places[param.name] = Place(param=param, segment=segment, start=start)
            for kind in present:
                ends[kind] = segment.extent(kind).stop
        for kind in kinds:
            extents[block.index, kind] = Extent(kind=kind, start=begins[kind], stop=ends[kind])
    return Layout(
        num_blocks=len(blocks),
        kinds=kinds,
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


def _num_bytes(kind: Kind, param_dtype: torch.dtype, num_elements: int) -> int:
    num_numbers = -(-num_elements // kind.elements_per_number)
    return int(num_numbers * kind_dtype(kind, param_dtype).itemsize)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
