"""Device slots: the only device memory that block weights ever occupy.

             fetch                 views
    FREE ------------> FILLED -----------------> read by compute until the next fetch

The store stays the owner. A slot holds a copy, so losing it loses nothing. Layers take turns in the
numbered slots, all as large as the largest layer; embedding and head have one each, by name. Who
may fill a slot and when is the schedule's part.

Laws (tests/engine/test_slots.py)
    1. A slot's views are the block's params, in their own shapes, without a copy.
    2. Nothing is allocated after construction.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatrain.memory.kinds import Kind
from megatrain.memory.layout import Layout

SlotId = int | str
Allocate = Callable[[int], Tensor]
"""Takes a number of bytes, returns that many as uint8."""


class Slots:
    """Buffers for weights, one per slot."""

    def __init__(
        self, layout: Layout, num_layer_slots: int, allocate: Allocate, *, embedding: bool = True
    ) -> None:
        """`embedding`: False if the embedding has no slot here."""
        self._layout = layout
        sizes = [
            layout.block_extents[block, Kind.HI].num_bytes for block in range(layout.num_blocks)
        ]
        largest = max(sizes[1:-1])
        self._buffers: dict[SlotId, Tensor] = {
            slot: allocate(largest) for slot in range(num_layer_slots)
        }
        if embedding:
            self._buffers["embedding"] = allocate(sizes[0])
        self._buffers["head"] = allocate(sizes[-1])
        self._views: dict[tuple[SlotId, int], dict[str, Tensor]] = {}

    def buffer(self, slot: SlotId, block: int) -> Tensor:
        """Return the bytes of `slot` that `block` fills."""
        return self._buffers[slot][: self._layout.block_extents[block, Kind.HI].num_bytes]

    def weights(self, slot: SlotId, block: int) -> dict[str, Tensor]:
        """Return the params of `block` as views into `slot`, which must hold that block."""
        views = self._views.get((slot, block))
        if views is None:
            buffer = self.buffer(slot, block)
            views = self._layout.block_params(block, Kind.HI, buffer)
            self._views[slot, block] = views
        return views
