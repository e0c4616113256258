"""The store: host home of every weight, master, optimizer state and waiting gradient.

One arena per kind, addressed as (block, kind, byte range) by the layout. Views handed out are the
bytes themselves, never copies, and stay valid as long as they are held. The store does not control
who writes when: the schedule does.

Laws (tests/memory/test_store.py)
    1. A param's views in all kinds are disjoint from every other param's.
    2. Nothing is resident before it is written.
    3. The arenas have exactly the bytes that the ledger names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.memory.arena import map_arena
from megatrain.memory.host import free_bytes
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import Layout, Segment, kind_dtype
from megatrain.memory.ledger import Ledger, Line
from megatrain.memory.master import join


def store_ledger(layout: Layout) -> Ledger:
    """Return the bytes that a store of `layout` occupies once all of it was written."""
    return Ledger(
        Line(place="host", purpose=kind.purpose, num_bytes=layout.kind_bytes[kind])
        for kind in layout.kinds
    )


class Store:
    """The arenas of a layout."""

    def __init__(self, layout: Layout) -> None:
        """Map the arenas. Raises DoesNotFit if their bytes are not free; touches none of them."""
        store_ledger(layout).require("host", free_bytes())
        self.layout = layout
        self._arenas = {kind: map_arena(kind.name, layout.kind_bytes[kind]) for kind in self.kinds}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that have an arena."""
        return self.layout.kinds

    def arena(self, kind: Kind) -> Tensor:
        """Return all bytes of a kind, as uint8."""
        return self._arenas[kind]

    def block_bytes(self, block: int, kind: Kind) -> Tensor:
        """Return the bytes of `block` in `kind`, as uint8: what a fetch or drain moves."""
        extent = self.layout.block_extents[block, kind]
        return self._arenas[kind][extent.start : extent.stop]

    def param(self, name: str, kind: Kind) -> Tensor:
        """Return the param's view in `kind`, in the kind's dtype and the param's shape.

        It is flat where several elements share a number.
        """
        place = self.layout.places[name]
        extent = place.extent(kind)
        flat = self._arenas[kind][extent.start : extent.stop]
        numbers = flat.view(kind_dtype(kind, place.param.dtype))
        return numbers.view(place.param.shape) if kind.elements_per_number == 1 else numbers

    def segment(self, segment: Segment, kind: Kind) -> Tensor:
        """Return a segment's flat view in `kind`, padding included: what one update pass walks."""
        extent = segment.extent(kind)
        return self._arenas[kind][extent.start : extent.stop].view(kind_dtype(kind, segment.dtype))

    def master(self, name: str) -> Tensor:
        """Return a copy of the fp32 master of `name`. Frozen params have none but their weight."""
        weight = self.param(name, Kind.HI)
        if self.layout.places[name].has(Kind.LO):
            return join(weight, self.param(name, Kind.LO))
        return weight.to(torch.float32, copy=True)
