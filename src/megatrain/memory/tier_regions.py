"""Where a block's bytes are in the scratch file of the disk tier.

    file      | region of block 0 | region of block 1 | ...
    region    | lo | m | v | grad |        one part for each kind on disk, each on a page boundary

A region in memory has the same bytes at the same offsets: a step reads it into a buffer, updates
it there and writes it back. A part has the bytes of the block in an arena of its kind, padding
included.

Laws (tests/memory/test_tier_regions.py)
    1. Parts never overlap, and each starts on a page, so that direct I/O can move any of them.
    2. A region has the bytes of its block in the tiered kinds, each rounded up to a page.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megatrain.memory.kinds import Kind
from megatrain.memory.layout import PAGE, Extent, Layout, Place, Segment


class TierRegions:
    """The scratch file of a layout. It allocates nothing."""

    def __init__(self, layout: Layout, kinds: tuple[Kind, ...]) -> None:
        """`kinds` are those on disk, of the kinds of the layout."""
        self.kinds = kinds
        self._layout = layout
        self._parts: dict[tuple[int, Kind], Extent] = {}
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
        """Of the file."""
        return self._starts[-1]

    def start(self, block: int) -> int:
        """Return the first byte of a block's region in the file."""
        return self._starts[block]

    def region_bytes(self, block: int) -> int:
        """Return the size of a block's region; 0 if nothing of it is on disk."""
        return self._starts[block + 1] - self._starts[block]

    def part(self, block: int, kind: Kind) -> Extent:
        """Return the bytes of `kind` in the region of `block`, whole pages."""
        return self._parts[block, kind]

    def parts(
        self, block: int, region: Tensor, kinds: Iterable[Kind] | None = None
    ) -> dict[Kind, Tensor]:
        """Return the parts in `region`, the bytes of a block's region in memory or more."""
        extents = [self.part(block, kind) for kind in (self.kinds if kinds is None else kinds)]
        return {extent.kind: region[extent.start : extent.stop] for extent in extents}

    def numbers(self, where: Segment | Place, kind: Kind) -> Extent:
        """Return where the numbers of a segment or a param are in the region of its block."""
        block = where.block if isinstance(where, Segment) else where.segment.block
        extent = where.extent(kind)
        offset = self.part(block, kind).start - self._layout.block_extents[block, kind].start
        return Extent(kind=kind, start=extent.start + offset, stop=extent.stop + offset)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
