"""Gradient slots: where a block's gradient adds up in fp32 before it is drained (gradients.py).

A slot is one flat fp32 buffer, laid out like the block's trained segments. Where compute shares the
host's memory, a sum of one part is that part: it is kept as it came, and only a second one makes
the two a sum in the buffer.

Laws (tests/engine/test_grad_slots.py)
    1. Sums are in fp32, in the order of the parts, whatever the dtype of the parts.
    2. A param that gets no gradient counts as zero; no offset ever shifts, and padding is zero: it
       adds nothing to the norm and moves no weight.
    3. What an earlier block left in a slot is never seen again.
    4. A param may have fewer rows than its place: the first ones then, the same in every part.
    5. A part may come as several, some rows each: the sum is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatrain.memory.layout import Layout, Place
from megatrain.step.ops import SlotId

Allocate = Callable[[int], Tensor]
"""Takes a number of bytes, returns that many as uint8."""


class GradSlots:
    """Buffers for gradients, one per slot."""

    def __init__(
        self,
        layout: Layout,
        users: dict[SlotId, list[int]],
        allocate: Allocate,
        *,
        keeps_first: bool,
    ) -> None:
        """`users` are the blocks that visit each slot; it is as large as the largest of them.

        `keeps_first` keeps the first part of a sum instead of a copy of it in the buffer.
        """
        self._keeps_first = keeps_first
        self._places = {
            block: [layout.segment_places(segment) for segment in layout.trained_segments(block)]
            for blocks in users.values()
            for block in blocks
        }
        self._buffers = {
            slot: allocate(4 * max(map(self._num_elements, blocks))).view(torch.float32)
            for slot, blocks in users.items()
        }
        self._views = {
            (slot, block): self._block_views(slot, block)
            for slot, blocks in users.items()
            for block in blocks
        }
        self._sums: dict[SlotId, dict[str, Tensor]] = {slot: {} for slot in users}

    def begin(self, slot: SlotId) -> None:
        """Forget what the slot holds: every sum is zero."""
        self._sums[slot] = {}

    def add(
        self,
        slot: SlotId,
        block: int,
        grads: Mapping[str, Tensor | None],
        first_row: int | None = None,
    ) -> None:
        """Add gradients by param name. Parts may be kept until the slot is moved out.

        With `first_row` they have some rows only, from that one on; nothing is kept then, and
        rows that are new must follow on those before.
        """
        sums, views = self._sums[slot], self._views[slot, block]
        for name, grad in grads.items():
            if grad is None:
                continue
            if first_row is not None:
                sums[name] = _with_rows(sums.get(name), views[name], first_row, grad)
                continue
            view = views[name][: len(grad)] if grad.dim() else views[name]
            if name not in sums:
                sums[name] = grad if self._keeps_first else view.copy_(grad)
            elif sums[name].data_ptr() == view.data_ptr():
                sums[name].add_(grad)
            else:
                sums[name] = view.copy_(sums[name]).add_(grad)

    def move_out(self, slot: SlotId, block: int, targets: Sequence[Tensor]) -> None:
        """Write the sums to flat `targets`, one per trained segment, in their dtype."""
        sums = self._sums[slot]
        self.begin(slot)
        for target, places in zip(targets, self._places[block], strict=True):
            for place in places:
                stop = place.start + place.param.num_elements
                part = target[place.start : stop].view(place.param.shape)
                if place.param.name in sums:
                    part.copy_(sums[place.param.name])
                else:
                    part.zero_()
                if stop < place.padded_stop:
                    target[stop : place.padded_stop].zero_()

    def parts(self, slot: SlotId, block: int) -> Iterator[tuple[str, int, slice, Tensor | None]]:
        """Yield param, segment, place in it and flat sum of all that the slot holds.

        None is zero; padding has no name.

        The sums are the slot's own memory: read them before the slot begins again.
        """
        sums = self._sums[slot]
        self.begin(slot)
        for number, places in enumerate(self._places[block]):
            for place in places:
                stop = place.start + place.param.num_elements
                total = sums.get(place.param.name)
                flat = None if total is None else total.view(-1)
                yield place.param.name, number, slice(place.start, stop), flat
                if stop < place.padded_stop:
                    yield "", number, slice(stop, place.padded_stop), None

    def _num_elements(self, block: int) -> int:
        return sum(places[-1].padded_stop for places in self._places[block])

    def _block_views(self, slot: SlotId, block: int) -> dict[str, Tensor]:
        """Return the block's params as views into the slot, in their own shapes."""
        views, start = {}, 0
        for places in self._places[block]:
            for place in places:
                views[place.param.name] = _view(self._buffers[slot][start:], place)
            start += places[-1].padded_stop
        return views


def _with_rows(total: Tensor | None, view: Tensor, first_row: int, grad: Tensor) -> Tensor:
    """Return the sum, in the slot's memory, with `grad` added to its rows from `first_row` on."""
    assert total is None or total.data_ptr() == view.data_ptr(), "the sum is not in its slot"
    num_rows, stop = 0 if total is None else len(total), first_row + len(grad)
    if first_row == num_rows:
        view[first_row:stop].copy_(grad)
        return view[:stop]
    assert stop <= num_rows, f"rows {first_row} to {stop} of a sum that has {num_rows}"
    view[first_row:stop].add_(grad)
    return view[:num_rows]


def _view(flat: Tensor, place: Place) -> Tensor:
    return flat[place.start : place.start + place.param.num_elements].view(place.param.shape)
