"""Gradient slots: where a block's gradient adds up in fp32 before it is drained.

A slot is one flat fp32 buffer, laid out like the block's trained segments. The first micro-batch
overwrites, later ones add; padding is zero: it adds nothing to the norm and moves no weight.

Laws (tests/memory/test_grad_slots.py)
    1. Sums are in fp32, in the order of the micro-batches, whatever the dtype of the parts.
    2. A param that gets no gradient counts as zero; no offset ever shifts.
    3. What an earlier block left in a slot is never seen again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.memory.layout import Layout, Segment
from megatrain.memory.slots import Allocate, SlotId


class GradSlots:
    """Buffers for gradients, one per slot."""

    def __init__(self, layout: Layout, users: dict[SlotId, list[int]], allocate: Allocate) -> None:
        """`users` says which blocks visit each slot; it is as large as the largest of them."""
        self._layout = layout
        self._buffers = {
            slot: allocate(4 * max(_num_elements(layout, block) for block in blocks)).view(
                torch.float32
            )
            for slot, blocks in users.items()
        }

    def segments(self, slot: SlotId, block: int) -> list[tuple[Segment, Tensor]]:
        """Return the block's trained segments with their flat parts of `slot`."""
        result, start = [], 0
        for segment in self._layout.trained_segments(block):
            stop = start + segment.num_elements
            result.append((segment, self._buffers[slot][start:stop]))
            start = stop
        return result

    def zero(self, slot: SlotId, block: int) -> None:
        """Begin a sum at zero."""
        for _, flat in self.segments(slot, block):
            flat.zero_()

    def put(
        self, slot: SlotId, block: int, grads: Mapping[str, Tensor | None], *, adds: bool
    ) -> None:
        """Take gradients by param name: add them to the sum, or begin it, zero for the rest."""
        for segment, flat in self.segments(slot, block):
            for place in self._layout.segment_places(segment):
                stop = place.start + place.param.num_elements
                grad = grads.get(place.param.name)
                part = flat[place.start : stop]
                if grad is None:
                    if not adds:
                        part.zero_()
                elif adds:
                    part.view(place.param.shape).add_(grad)
                else:
                    part.view(place.param.shape).copy_(grad)
                if not adds:
                    flat[stop : place.padded_stop].zero_()


def _num_elements(layout: Layout, block: int) -> int:
    return sum(segment.num_elements for segment in layout.trained_segments(block))
