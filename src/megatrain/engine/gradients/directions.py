"""Directions: what the optimizer makes of the gradients of matrices, orthogonalized on the device.

    MOMENTUM(b)        host lane       directions take the place of gradients (engine/updates.py)
    SEND(b)            send(op)        in lane: this rank's part to the gradient slot of the block
    COLLECT(b)         collect(op)     comm lane: the parts of other ranks beside it
    ORTHOGONALIZE(b)   orthogonalize   compute lane: each matrix as a whole, in place
    RETURN(b)          give_back(op)   out lane: this rank's part to where the gradient was

The slot is free: the gradient that added up there was drained before, and the schedule gives it to
the next block after RETURN. It has the directions one segment behind the other, in the dtype of the
weights, with the parts of all ranks. A rank orthogonalizes the matrices that it owns a part of.
Where compute shares the host's memory directions stay where gradients wait.

Who waits: nothing here does. Copies and kernels are queued on the stream of their lane.

Laws (tests/engine/test_muon.py)
    1. A matrix is orthogonalized as a whole, once per step, whatever the number of ranks.
    2. Device memory is that of gradient slots, and what one matrix, or some experts, need
       meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatrain.devices.device import Device
from megatrain.memory.layout import Layout, Segment, overlap
from megatrain.optim.muon import orthogonalize
from megatrain.ranks.ranks import Ranks
from megatrain.step.ops import Op, SlotId

Targets = Sequence[tuple[Segment, Tensor]]


def direction_bytes(layout: Layout, block: int) -> int:
    """Return the bytes of a block's directions on the device, with the parts of all ranks."""
    segments = layout.matrix_segments(block)
    return sum(segment.gathered_elements * segment.dtype.itemsize for segment in segments)


class Directions:
    """The directions of one engine: it owns no memory."""

    def __init__(
        self, layout: Layout, device: Device, buffers: Mapping[SlotId, Tensor], ranks: Ranks
    ) -> None:
        """`buffers` is the memory of gradient slots, which may be another one in another step."""
        self._layout = layout
        self._device = device
        self._buffers = buffers
        self._ranks = ranks

    def send(self, op: Op, gradient: Targets) -> int:
        """Queue the copy of the directions in `gradient` to the slot; return its bytes."""
        num_bytes = 0
        for whole, own in self._own_parts(op, gradient):
            self._device.copy(whole, own)
            num_bytes += own.nbytes
        return num_bytes

    def collect(self, op: Op) -> int:
        """Queue what brings the parts of other ranks; return their bytes."""
        num_bytes = 0
        for segment, parts in self._sent(op):
            self._device.communicate([parts], [parts], partial(self._ranks.wire.gather, parts))
            num_bytes += parts.nbytes - parts.nbytes // segment.owner.size
        return num_bytes

    def orthogonalize(self, op: Op, gradient: Targets) -> None:
        """Replace the directions of all matrices that are here, in `gradient` or else the slot."""
        if gradient:
            found = [(s, self._device.in_place(flat)) for s, flat in gradient if s.matrices]
        else:
            found = [(s, parts.view(s.dtype)) for s, parts in self._sent(op)]
        with torch.no_grad():
            for segment, flat in found:
                for place in self._layout.segment_places(segment):
                    stop = place.start + place.param.num_elements
                    if overlap(range(place.start, stop), segment.owned):
                        orthogonalize(flat[place.start : stop].view(place.param.shape))

    def give_back(self, op: Op, gradient: Targets) -> int:
        """Queue the copy of this rank's part to `gradient`; return its bytes."""
        num_bytes = 0
        for whole, own in self._own_parts(op, gradient):
            self._device.copy(own, whole)
            num_bytes += own.nbytes
        return num_bytes

    def _own_parts(self, op: Op, gradient: Targets) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what this rank owns, as bytes: in the slot, and on the host."""
        own = {id(segment): flat for segment, flat in gradient}
        for segment, parts in self._sent(op):
            flat = own[id(segment)].view(torch.uint8)
            start = segment.owned.start * segment.dtype.itemsize
            yield parts[start : start + flat.nbytes], flat

    def _sent(self, op: Op) -> Iterator[tuple[Segment, Tensor]]:
        """Yield the op's directions in their slot, as bytes, with the parts of all ranks."""
        assert op.block is not None
        buffer, start = self._buffers[op.place("direction")[1]].view(torch.uint8), 0
        for segment in self._layout.matrix_segments(op.block):
            stop = start + segment.gathered_elements * segment.dtype.itemsize
            yield segment, buffer[start:stop]
            start = stop
