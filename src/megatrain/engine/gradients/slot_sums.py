"""Sums in gradient slots: the policy of a device that copies.

Compute adds each part to its slot in fp32. Where ranks share the store, the slot is then exchanged:
this rank's part of it becomes the sum of all ranks. The drain rounds the sums once, to the dtype of
the host, and sends them there.

Laws (tests/engine/gradients/test_sums.py)
    1. Sums are in fp32, in the order of the parts, whatever the dtype of the parts.
    2. A param that gets no gradient counts as zero; no offset ever shifts, and padding is zero: it
       adds nothing to the norm and moves no weight.
    3. What an earlier tenant left in a slot is never seen again.
    4. A part may come as several, some rows each: the sum is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from torch import Tensor

from megatrain.engine.embedding_rows import EmbeddingRows
from megatrain.engine.gradients.outbox import DirectCopies, Outbox
from megatrain.engine.gradients.slots import GradSlots
from megatrain.memory.layout import Segment, overlap
from megatrain.step.ops import SlotId

if TYPE_CHECKING:
    from megatrain.engine.exchange import Exchange


class SlotSums:
    """Sums in fp32 that stay in their slots until they are drained."""

    def __init__(
        self,
        slots: GradSlots,
        copies: Outbox | DirectCopies,
        *,
        exchange: Exchange | None = None,
        rows: EmbeddingRows | None = None,
    ) -> None:
        """`exchange` is there if ranks share the store, `rows` if the embedding goes by rows."""
        self._slots = slots
        self._copies = copies
        self._exchange = exchange
        self._rows = rows
        self._sums: dict[SlotId, dict[str, Tensor]] = {slot: {} for slot in slots}
        """Sums by param: views into the slot, of all rows or of those that have a sum so far."""

    def reserve(self) -> None:
        """Make room for what a step needs. Nothing may be under way."""
        if self._rows is not None:
            self._sums = {slot: {} for slot in self._slots}
        self._slots.reserve(0 if self._rows is None else self._rows.num_rows)

    def release(self) -> None:
        """Give up the memory of all slots until the next `reserve`. Nothing may be under way."""
        self._sums = {slot: {} for slot in self._slots}
        self._slots.release()

    def begin(self, slot: SlotId) -> None:
        """Forget what the slot holds: every sum is zero."""
        self._sums[slot] = {}

    def add(
        self,
        slot: SlotId,
        tenant: int,
        grads: Mapping[str, Tensor],
        first_row: int | None = None,
    ) -> None:
        """Add gradients by param name.

        With `first_row` they have some rows only, from that one on; rows that are new must follow
        on those before.
        """
        for name, grad in grads.items():
            place = self._slots.views[tenant][name]
            if first_row is None:
                self._add(slot, name, place, grad)
            else:
                self._add_from(first_row, slot, name, place, grad)

    def _add(self, slot: SlotId, name: str, place: Tensor, grad: Tensor) -> None:
        sums = self._sums[slot]
        if name in sums:
            sums[name].add_(grad)
        else:
            sums[name] = place.copy_(grad)

    def _add_from(
        self, first_row: int, slot: SlotId, name: str, place: Tensor, grad: Tensor
    ) -> None:
        total = self._sums[slot].get(name)
        num_rows, stop = 0 if total is None else len(total), first_row + len(grad)
        if first_row == num_rows:
            place[first_row:stop].copy_(grad)
            self._sums[slot][name] = place[:stop]
            return
        assert stop <= num_rows, f"rows {first_row} to {stop} of a sum that has {num_rows}"
        place[first_row:stop].add_(grad)

    def add_zeros(self, slot: SlotId, tenant: int, name: str, rows: range) -> None:
        """Add some rows of zeros: they are there, and count as a part."""
        place = self._slots.views[tenant][name]
        zeros = place.new_zeros(()).expand(len(rows), *place.shape[1:])
        self._add_from(rows.start, slot, name, place, zeros)

    def exchange(self, slot: SlotId, tenant: int) -> int:
        """Queue what makes this rank's part of the sums those of all ranks.

        Returns the bytes that go to others.
        """
        assert self._exchange is not None
        segments, num_bytes = self._slots.layout.trained_segments(tenant), 0
        for number, elements, total in self._runs(slot, tenant):
            segment = segments[number]
            num_bytes += self._exchange.add_up(total, elements, segment.parts, segment.dtype)
        return num_bytes

    def _runs(self, slot: SlotId, tenant: int) -> Iterator[tuple[int, range, Tensor]]:
        """Yield segment, elements of it and their sums, flat, of all that the slot holds.

        Params that follow on each other in slot and segment are one run. The sums are the slot's
        own memory, to read and to change. A param that has no gradient is zero.
        """
        buffer, portions = self._slots.buffers[slot], self._slots.portions[tenant]
        starts = accumulate((portion.padded_elements for portion in portions), initial=0)
        placed = list(zip(portions, starts, strict=False))
        for portion, start in placed:
            self._fill_up(slot, tenant, portion.name)
            buffer[start + portion.num_elements : start + portion.padded_elements].zero_()
        for (segment, _), run in groupby(
            placed, lambda one: (one[0].segment, one[0].start - one[1])
        ):
            (first, start), *others = run
            last = others[-1][0] if others else first
            elements = range(first.start, last.start + last.num_elements)
            yield segment, elements, buffer[start : start + len(elements)]

    def _fill_up(self, slot: SlotId, tenant: int, name: str) -> None:
        """Make a sum complete; rows that have no gradient are zero."""
        place, total = self._slots.views[tenant][name], self._sums[slot].get(name)
        place[0 if total is None else len(total) :].zero_()
        self._sums[slot][name] = place

    def drain(self, slot: SlotId, tenant: int, targets: Sequence[tuple[Segment, Tensor]]) -> int:
        """Queue the copies of the sums to flat `targets`, one per trained segment.

        A target has what this rank owns of its segment. Returns the bytes that are copied. The
        slot is free for its next tenant when the copies are done.
        """
        num_bytes = 0
        self._copies.begin()
        for name, number, span, total in self._parts(slot, tenant):
            segment, whole = targets[number]
            if self._rows is not None and name == self._rows.name:
                target = self._rows.drained()
            else:
                owned = segment.owned
                here = overlap(range(span.start, span.stop), owned)
                target = whole[here.start - owned.start : here.stop - owned.start]
                if total is not None:
                    total = total.view(-1)[here.start - span.start : here.stop - span.start]
            num_bytes += target.nbytes
            self._copies.send(target, None if total is None else total.view(-1))
        return num_bytes

    def _parts(self, slot: SlotId, tenant: int) -> Iterator[tuple[str, int, slice, Tensor | None]]:
        """Yield param, segment, place in it and sum of all that the slot holds.

        None is zero; padding has no name.
        """
        sums = self._sums[slot]
        self.begin(slot)
        for portion in self._slots.portions[tenant]:
            span = slice(portion.start, portion.start + portion.num_elements)
            yield portion.name, portion.segment, span, sums.get(portion.name)
            if portion.padding.start < portion.padding.stop:
                yield "", portion.segment, portion.padding, None
