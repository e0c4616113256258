"""The layout of the store: every byte of each param as (block, kind, byte range).

A kind is one arena. Inside it blocks follow each other, each on a page boundary, so that a block
can be registered with a device, written with direct I/O or moved to a disk.

    arena `hi`   | block 0: segment, segment | block 1: segment | ...
    segment      | param | pad | param | pad | ...      one dtype, all trained or all frozen

Where an optimizer keeps other states for the matrices of layers, these are segments of their own.

Narrow params (megatrain/narrow.py) are bytes: their elements here are those of their form, in a
segment of uint8.

Inside a block params of equal dtype form a *segment*, and a param has the same element offset in
every kind of its segment. One pass over a segment therefore updates all of its params, with plain
pointers: hi[i], lo[i], grad[i] and the optimizer's states at i belong together for every i. Padding
holds zeros, and an update of zeros by zero gradients leaves zeros.

Where ranks share a store, each has its part of every segment, cut on ALIGN elements, in every kind
(ranks/ownership.py). Segments and params are numbered over all ranks; arenas have what is here.

Laws (tests/memory/test_layout.py)
    1. Params never overlap, in any kind; each starts on ALIGN elements, each block on PAGE bytes.
    2. Frozen params have weights only; fp32 params have no `lo`.
    3. The bytes of a kind are known before anything is allocated.
    4. The arenas of all ranks together have every element of every param once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.memory.kinds import TensorKind, divides_matrices
from megatrain.models.decoder import Block, Param
from megatrain.ranks.ownership import SOLE, Owner

PAGE = 4096
ALIGN = 256
"""Elements: full blocks of 8-bit states, the matrix alignment of devices, and full cache lines."""


def overlap(one: range, other: range) -> range:
    """Return what two ranges of elements have in common; empty, at the start of `one` or behind."""
    start = min(max(one.start, other.start), one.stop)
    return range(start, max(start, min(one.stop, other.stop)))


def kind_dtype(kind: TensorKind, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of `kind` for a param of `param_dtype`, which has it."""
    if param_dtype is torch.uint8:  # a narrow param, which has weights only
        return param_dtype
    name = kind.dtype(is_fp32=param_dtype is torch.float32)
    assert name is not None, (kind.name, param_dtype)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def has_kind(kind: TensorKind, dtype: torch.dtype, *, trained: bool, matrices: bool) -> bool:
    """Return whether params of such a segment have bytes of `kind` at all."""
    has_numbers = kind.dtype(is_fp32=dtype is torch.float32) is not None
    meant = kind.is_for_matrices or not matrices
    return has_numbers and meant and (trained or kind.is_for_frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A byte range of one arena."""

    kind: TensorKind
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
    matrices: bool = False
    """Matrices of a hidden layer, for which the optimizer keeps other states than for the rest."""
    num_elements: int
    """Elements of all ranks, padding included."""
    owner: Owner
    """The rank whose part is here."""
    starts: dict[TensorKind, int]
    """First byte of this rank's part, in the arena of each kind that it has."""

    @property
    def owned(self) -> range:
        """The elements that are here."""
        return self.owner.owned(self.num_elements, ALIGN)

    @property
    def parts(self) -> list[range]:
        """The elements of each rank."""
        return self.owner.parts(self.num_elements, ALIGN)

    @property
    def gathered_elements(self) -> int:
        """Room for the parts of all ranks, as if none were shorter."""
        return self.owner.size * self.owner.part(self.num_elements, ALIGN)

    def extent(self, kind: TensorKind) -> Extent:
        """Return its bytes in the arena of `kind`."""
        start = self.starts[kind]
        size = _num_bytes(kind, self.dtype, len(self.owned))
        return Extent(kind=kind, start=start, stop=start + size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a param in its segment."""

    param: Param
    segment: Segment
    start: int
    """Elements from the start of the segment."""

    @property
    def owned(self) -> range:
        """The elements of the param that are here, counted from its first; of a form its bytes."""
        return self._within(self.segment.owned)

    @property
    def parts(self) -> list[range]:
        """The elements of the param that each rank has, counted from its first."""
        return [self._within(part) for part in self.segment.parts]

    def extent(self, kind: TensorKind) -> Extent:
        """Return the bytes of what is here of the param in the arena of `kind`, without padding."""
        dtype, owned = self.segment.dtype, self.owned
        first = self.start + owned.start - self.segment.owned.start
        start = self.segment.starts[kind] + _num_bytes(kind, dtype, max(0, first))
        return Extent(kind=kind, start=start, stop=start + _num_bytes(kind, dtype, len(owned)))

    @property
    def padded_stop(self) -> int:
        """The next element where a param may start."""
        return self.start + _round_up(self.param.stored_elements, ALIGN)

    def has(self, kind: TensorKind) -> bool:
        """Return whether the param has bytes of `kind`."""
        return kind in self.segment.starts

    def _within(self, elements: range) -> range:
        """Return which of the segment's elements are the param's, counted from its first."""
        found = overlap(range(self.start, self.start + self.param.stored_elements), elements)
        return range(found.start - self.start, found.stop - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The places of all params. Immutable, and the same for the same blocks and rank anywhere."""

    num_blocks: int
    owner: Owner
    kinds: tuple[TensorKind, ...]
    segments: tuple[Segment, ...]
    places: dict[str, Place]
    """Places by the param's name."""
    block_extents: dict[tuple[int, TensorKind], Extent]
    kind_bytes: dict[TensorKind, int]
    """The exact size of each arena."""

    def only(self, kinds: tuple[TensorKind, ...]) -> Layout:
        """Return the layout with arenas of `kinds` alone, and every param where it is in them."""
        return replace(
            self,
            kinds=kinds,
            block_extents={key: e for key, e in self.block_extents.items() if key[1] in kinds},
            kind_bytes={kind: self.kind_bytes[kind] for kind in kinds},
        )

    def block_places(self, block: int) -> list[Place]:
        """Return the places of a block's params."""
        return [place for place in self.places.values() if place.segment.block == block]

    def segment_places(self, segment: Segment) -> list[Place]:
        """Return the places of a segment's params, in order."""
        return [place for place in self.places.values() if place.segment is segment]

    def trained_segments(self, block: int) -> list[Segment]:
        """Return the segments of a block that get gradients."""
        return [s for s in self.segments if s.block == block and s.trained]

    def matrix_segments(self, block: int) -> list[Segment]:
        """Return the segments of a block whose gradients become directions (optim/muon.py)."""
        return [segment for segment in self.trained_segments(block) if segment.matrices]

    def first_trained(self, segment: Segment) -> int:
        """Return the number of a trained segment's first element, padding counted.

        It depends on the model alone, not on threads or ranks.
        """
        earlier = self.segments[: self.segments.index(segment)]
        return sum(other.num_elements for other in earlier if other.trained)

    def gathered_starts(self, block: int) -> list[tuple[Segment, int]]:
        """Return the block's segments, and their first bytes where its weights are gathered."""
        starts, start = [], 0
        for segment in self.segments:
            if segment.block == block:
                starts.append((segment, start))
                start += segment.gathered_elements * segment.dtype.itemsize
        return starts

    def gathered_bytes(self, block: int) -> int:
        """Return the bytes of a block's weights with the parts of all ranks."""
        segments = [segment for segment in self.segments if segment.block == block]
        return sum(segment.gathered_elements * segment.dtype.itemsize for segment in segments)

    def gathered_params(self, block: int, buffer: Tensor) -> dict[str, Tensor]:
        """Return the params of a block as views into `buffer`, where its weights are gathered.

        Narrow ones are flat bytes.
        """
        views = {}
        for segment, begin in self.gathered_starts(block):
            flat = buffer[begin:][: segment.num_elements * segment.dtype.itemsize]
            for place in self.segment_places(segment):
                span = slice(place.start, place.start + place.param.stored_elements)
                view = flat.view(segment.dtype)[span]
                views[place.param.name] = view if place.param.form else view.view(place.param.shape)
        return views

    def wide_starts(
        self, block: int, without: frozenset[str] = frozenset()
    ) -> list[tuple[Param, int]]:
        """Return the narrow params of a block, and the first byte of each where they are wide."""
        starts, start = [], 0
        for place in self.block_places(block):
            if place.param.form and place.param.name not in without:
                starts.append((place.param, start))
                start += _wide_bytes(place.param)
        return starts

    def wide_bytes(self, block: int, without: frozenset[str] = frozenset()) -> int:
        """Return the bytes of a block's narrow params when they are wide."""
        return sum(_wide_bytes(param) for param, _ in self.wide_starts(block, without))

    @property
    def num_params(self) -> int:
        """Scalars of all ranks, padding not counted."""
        return sum(place.param.num_elements for place in self.places.values())


def build_layout(
    blocks: Iterable[Block], kinds: tuple[TensorKind, ...], owner: Owner = SOLE
) -> Layout:
    """Return the layout of what `owner` has of `blocks` in `kinds`.

    Params keep their order, but bf16 comes before fp32, frozen params come then, and narrow ones
    last. Matrices come first, if they have other kinds than the rest.
    """
    blocks = tuple(blocks)
    assert all(ALIGN % kind.elements_per_number == 0 for kind in kinds), kinds
    ends = dict.fromkeys(kinds, 0)
    segments: list[Segment] = []
    places: dict[str, Place] = {}
    extents: dict[tuple[int, TensorKind], Extent] = {}
    apart = divides_matrices(kinds)
    for block in blocks:
        matrices = block.hidden_matrices if apart else frozenset()
        begins = {kind: _round_up(end, PAGE) for kind, end in ends.items()}
        ends = dict(begins)
        for key, params in _grouped(block, matrices):
            starts, num_elements = [], 0
            for param in params:
                starts.append(num_elements)
                num_elements += _round_up(param.stored_elements, ALIGN)
            present = [
                kind
                for kind in kinds
                if has_kind(kind, key.dtype, trained=key.trained, matrices=key.matrices)
            ]
            segment = Segment(
                block=block.index,
                dtype=key.dtype,
                trained=key.trained,
                matrices=key.matrices,
                num_elements=num_elements,
                owner=owner,
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
        owner=owner,
        kinds=kinds,
        segments=tuple(segments),
        places=places,
        block_extents=extents,
        kind_bytes={kind: _round_up(end, PAGE) for kind, end in ends.items()},
    )


class _Key(NamedTuple):
    """What the params of a segment have in common."""

    trained: bool
    dtype: torch.dtype
    matrices: bool


def _grouped(block: Block, matrices: frozenset[str]) -> list[tuple[_Key, list[Param]]]:
    """Return the params of each segment of a block, in order."""
    groups: dict[_Key, list[Param]] = {
        _Key(trained, dtype, matrix): []
        for trained in (True, False)
        for dtype in (torch.bfloat16, torch.float32)
        for matrix in (True, False)
    }
    groups[_Key(False, torch.uint8, False)] = []
    for param in block.params:
        matrix = param.trained and param.name in matrices
        groups[_Key(param.trained, param.stored_dtype, matrix)].append(param)
    return [(key, params) for key, params in groups.items() if params]


def _num_bytes(kind: TensorKind, param_dtype: torch.dtype, num_elements: int) -> int:
    num_numbers = -(-num_elements // kind.elements_per_number)
    return int(num_numbers * kind_dtype(kind, param_dtype).itemsize)


def _wide_bytes(param: Param) -> int:
    return _round_up(param.num_elements, ALIGN) * param.dtype.itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
