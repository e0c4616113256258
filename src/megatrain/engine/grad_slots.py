"""Gradient slots: where a block's gradient adds up in fp32 before it is drained (gradients.py).

A slot is one flat fp32 buffer that its tenants use one after another: blocks, or pieces of the
head. It has a tenant's params one behind the other, of some of them a few rows only.

Where compute shares the host's memory, a gradient has a home, where it will be drained to, and as
little as possible is anywhere else:

    one part            is kept as it came, or goes home at once if it comes as several
    more parts          add up at home, if that is in fp32, else in the slot
    rows of some tokens add to those rows of the sum alone

Laws (tests/engine/test_grad_slots.py)
    1. Sums are in fp32, in the order of the parts, whatever the dtype of the parts.
    2. A param that gets no gradient counts as zero; no offset ever shifts, and padding is zero: it
       adds nothing to the norm and moves no weight.
    3. What an earlier tenant left in a slot is never seen again.
    4. The pieces of a block, one after another, write all of its gradient, and each element once.
    5. A part may come as several, some rows each, or as the rows that are not zero: the sum is the
       same, bit for bit, with a home and without.
    6. Memory is allocated at construction and, for rows, in `reserve`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.memory.layout import ALIGN, Layout, Place
from megatrain.step.ops import SlotId

Allocate = Callable[[int], Tensor]
"""Takes a number of bytes, returns that many as uint8."""
Tenant = tuple[int, int]
"""A block and its piece; a block that is not cut is its piece 0."""


class Portion(NamedTuple):
    """What a tenant has of one param: all of it, or some of its rows."""

    name: str
    segment: int
    """The number of its segment among the trained ones of the block."""
    start: int
    """Of its first element in the segment."""
    shape: tuple[int, ...]
    padding: slice
    """What else of the segment is this tenant's to fill, with zeros."""

    @property
    def num_elements(self) -> int:
        return int(torch.Size(self.shape).numel())


class GradSlots:
    """Buffers for gradients, one per slot."""

    def __init__(
        self,
        layout: Layout,
        users: Mapping[SlotId, Sequence[Tenant]],
        allocate: Allocate,
        *,
        keeps_first: bool,
        cuts: Mapping[str, Sequence[slice]] | None = None,
        gathered: str | None = None,
        homes: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`users` are the tenants of each slot; it is as large as the largest of them.

        `keeps_first` keeps the first part of a sum instead of a copy of it in the buffer. `cuts`
        has the rows of each piece of a param; the other params of its block are of the last piece.
        Of the param `gathered` there are as many rows as `reserve` says, and its slot begins there.
        `homes` are where gradients will be moved to, by param: compute may write there.
        """
        self._homes = homes or {}
        self._layout, self._users, self._allocate = layout, users, allocate
        self._keeps_first, self._cuts, self._gathered = keeps_first, cuts or {}, gathered
        self._num_pieces = Counter(block for tenants in users.values() for block, _ in tenants)
        self._num_rows = 0
        self._buffers: dict[SlotId, Tensor] = {}
        self._portions: dict[Tenant, list[Portion]] = {}
        self._views: dict[Tenant, dict[str, Tensor]] = {}
        self._sums: dict[SlotId, dict[str, _Sum]] = {slot: {} for slot in users}
        self._rows_slot = None if gathered is None else self._slot_with(gathered)
        for slot in users:
            if slot != self._rows_slot:
                self._make_room(slot)

    def reserve(self, num_rows: int) -> None:
        """Make room for so many rows of the param `gathered`. Nothing may be under way."""
        self._num_rows = num_rows
        if self._rows_slot is not None:
            self._make_room(self._rows_slot)

    def begin(self, slot: SlotId) -> None:
        """Forget what the slot holds: every sum is zero."""
        self._sums[slot] = {}

    def add(
        self,
        slot: SlotId,
        tenant: Tenant,
        grads: Mapping[str, Tensor | None],
        first_row: int | None = None,
    ) -> None:
        """Add gradients by param name. Parts may be kept until the slot is moved out.

        With `first_row` they have some rows only, from that one on; nothing is kept then, and
        rows that are new must follow on those before.
        """
        for name, grad in grads.items():
            if grad is None:
                continue
            total = self._sum(slot, tenant, name)
            if first_row is None:
                total.add(grad)
            else:
                total.add_from(first_row, grad)

    def add_rows(self, slot: SlotId, tenant: Tenant, name: str, ids: Tensor, grad: Tensor) -> None:
        """Add a gradient that is zero but for the rows `ids`, which are distinct."""
        self._sum(slot, tenant, name).add_rows(ids, grad)

    def _sum(self, slot: SlotId, tenant: Tenant, name: str) -> _Sum:
        sums = self._sums[slot]
        if name not in sums:
            home = self._homes.get(name)
            if home is not None and name in self._cuts:
                home = home[self._cuts[name][tenant[1]]]
            sums[name] = _Sum(self._views[tenant][name], home, keeps_first=self._keeps_first)
        return sums[name]

    def move_out(self, slot: SlotId, tenant: Tenant, targets: Sequence[Tensor]) -> int:
        """Write the sums to flat `targets`, one per trained segment, in their dtype.

        Returns the bytes that were written.
        """
        sums, num_bytes = self._sums[slot], 0
        for name, number, span, _ in self.parts(slot, tenant):
            target = targets[number][span]
            num_bytes += target.nbytes
            if name in sums:
                sums[name].move_to(target)
            else:
                target.zero_()
        return num_bytes

    def parts(
        self, slot: SlotId, tenant: Tenant
    ) -> Iterator[tuple[str, int, slice, Tensor | None]]:
        """Yield param, segment, place in it and sum of all that the slot holds.

        None is zero; padding has no name.

        The sums are the slot's own memory: read them before the slot begins again.
        """
        sums = self._sums[slot]
        self.begin(slot)
        for portion in self._portions[tenant]:
            span = slice(portion.start, portion.start + portion.num_elements)
            total = sums.get(portion.name)
            yield portion.name, portion.segment, span, None if total is None else total.whole
            if portion.padding.start < portion.padding.stop:
                yield "", portion.segment, portion.padding, None

    def runs(self, slot: SlotId, tenant: Tenant) -> Iterator[tuple[int, range, Tensor]]:
        """Yield segment, elements of it and their sums, flat, of all that the slot holds.

        The sums are the slot's own memory, to read and to change. What has no gradient is zero.
        """
        buffer, start = self._buffers[slot], 0
        run: tuple[int, int, int, int] | None = None
        for portion in self._portions[tenant]:
            size = portion.num_elements
            self._sum(slot, tenant, portion.name).fill_up()
            buffer[start + size : start + _padded(portion)].zero_()
            stop = portion.start + size
            if (
                run is not None
                and run[0] == portion.segment
                and portion.start - run[1] == start - run[3]
            ):
                run = (run[0], run[1], stop, run[3])
            else:
                if run is not None:
                    yield _run(buffer, *run)
                run = (portion.segment, portion.start, stop, start)
            start += _padded(portion)
        if run is not None:
            yield _run(buffer, *run)

    def _slot_with(self, name: str) -> SlotId | None:
        block = self._layout.places[name].segment.block
        return next((slot for slot, users in self._users.items() if (block, 0) in users), None)

    def _make_room(self, slot: SlotId) -> None:
        """Lay out the slot's tenants; allocate it if it is not large enough for them."""
        tenants = self._users[slot]
        self._portions |= {tenant: list(self._portions_of(tenant)) for tenant in tenants}
        needed = 4 * max(sum(map(_padded, self._portions[tenant])) for tenant in tenants)
        if slot not in self._buffers or self._buffers[slot].nbytes < needed:
            self._sums[slot] = {}
            for tenant in tenants:  # what holds the memory of a smaller buffer
                self._views.pop(tenant, None)
            self._buffers.pop(slot, None)
            self._buffers[slot] = self._allocate(needed).view(torch.float32)
        for tenant in tenants:
            self._views[tenant] = _views(self._buffers[slot], self._portions[tenant])

    def _portions_of(self, tenant: Tenant) -> Iterator[Portion]:
        block, piece = tenant
        last = piece == self._num_pieces[block] - 1
        for number, segment in enumerate(self._layout.trained_segments(block)):
            for place in self._layout.segment_places(segment):
                if place.param.name in self._cuts:
                    rows = self._cuts[place.param.name][piece]
                    yield _rows_of(place, number, rows, pads=last)
                elif last:
                    portion = _rows_of(place, number, None, pads=True)
                    if place.param.name == self._gathered:
                        portion = portion._replace(shape=(self._num_rows, *portion.shape[1:]))
                    yield portion


class _Sum:
    """The gradient of a param so far."""

    def __init__(self, slot: Tensor, home: Tensor | None, *, keeps_first: bool) -> None:
        self._wide = slot if home is None or home.dtype is not torch.float32 else home
        self._home, self._keeps_first = home, keeps_first
        self.whole: Tensor | None = None
        """The sum but for `_rows`: a part as it came, at home, or in fp32. None: zero."""
        self._rows: tuple[Tensor, Tensor] | None = None
        """Numbers and values of rows that are instead of those of `whole`."""

    def add(self, grad: Tensor) -> None:
        """Add a part, which may be kept."""
        if self.whole is not None or self._rows is not None:
            self._widen().add_(grad)
        else:
            self.whole = grad if self._keeps_first else self._wide.copy_(grad)

    def add_from(self, first_row: int, grad: Tensor) -> None:
        """Add some rows of a part. New ones follow on those before."""
        num_rows, stop = 0 if self.whole is None else len(self.whole), first_row + len(grad)
        if first_row == num_rows:
            home = self._home
            place = self._wide if home is None or home.dtype is not grad.dtype else home
            assert self.whole is None or _same(self.whole, place), "the sum is not in its place"
            place[first_row:stop].copy_(grad)
            self.whole = place[:stop]
            return
        assert stop <= num_rows, f"rows {first_row} to {stop} of a sum that has {num_rows}"
        self._widen()[first_row:stop].add_(grad)

    def add_rows(self, ids: Tensor, grad: Tensor) -> None:
        """Add rows of a part that is zero elsewhere. They may be kept."""
        if self._rows is not None or (self.whole is not None and _same(self.whole, self._wide)):
            self._widen().index_add_(0, ids, grad.float())
        elif self.whole is None:
            self._rows = ids, grad
        else:
            self._rows = ids, self.whole.index_select(0, ids).float().add_(grad)

    def move_to(self, target: Tensor) -> None:
        """Write the sum to flat memory, rounded once to its dtype."""
        shaped = target.view(self._wide.shape)
        if self.whole is None:
            shaped.zero_()
        elif not _same(self.whole, shaped):
            shaped.copy_(self.whole)
        if self._rows is not None:
            ids, values = self._rows
            shaped.index_copy_(0, ids, values.to(shaped.dtype))

    def fill_up(self) -> None:
        """Make the sum complete in fp32; rows that have no gradient are zero."""
        assert self.whole is None or _same(self.whole, self._wide), "a sum is not in its slot"
        self._wide[0 if self.whole is None else len(self.whole) :].zero_()
        self.whole = self._wide

    def _widen(self) -> Tensor:
        """Return the sum in fp32, where it can be added to."""
        if self.whole is None:
            self.whole = self._wide.zero_()
        elif not _same(self.whole, self._wide):
            self.whole = self._wide[: len(self.whole)].copy_(self.whole)
        if self._rows is not None:
            ids, values = self._rows
            self.whole.index_copy_(0, ids, values.float())
            self._rows = None
        return self.whole


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether both begin at the same place in memory."""
    return one.data_ptr() == other.data_ptr() and one.dtype is other.dtype


def _rows_of(place: Place, segment: int, rows: slice | None, *, pads: bool) -> Portion:
    """Return some rows of a param, or all; `pads`: and the zeros behind it."""
    name, shape, start = place.param.name, tuple(place.param.shape), place.start
    stop = start + place.param.num_elements
    if rows is not None:
        start += rows.start * (place.param.num_elements // shape[0])
        shape = (rows.stop - rows.start, *shape[1:])
    return Portion(name, segment, start, shape, slice(stop, place.padded_stop if pads else stop))


def _run(
    buffer: Tensor, segment: int, begin: int, end: int, start: int
) -> tuple[int, range, Tensor]:
    return segment, range(begin, end), buffer[start : start + end - begin]


def _padded(portion: Portion) -> int:
    return -(-portion.num_elements // ALIGN) * ALIGN


def _views(buffer: Tensor, portions: Sequence[Portion]) -> dict[str, Tensor]:
    """Return the portions as views into the slot, in their own shapes."""
    views, start = {}, 0
    for portion in portions:
        views[portion.name] = buffer[start : start + portion.num_elements].view(portion.shape)
        start += _padded(portion)
    return views
