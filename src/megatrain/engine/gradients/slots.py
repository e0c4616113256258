"""Gradient slots: flat fp32 buffers, and where the params of their tenants are in them.

A slot is used by its tenants, which are blocks, one after another. It has a tenant's params one
behind the other; of the embedding by rows, as many rows as a step has distinct tokens.

Laws (tests/engine/gradients/test_slots.py)
    1. A slot is as large as the largest of its tenants.
    2. Memory is allocated at construction and, for rows, in `reserve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.memory.layout import ALIGN, Layout
from megatrain.step.ops import SlotId

Allocate = Callable[[int], Tensor]
"""Takes a number of bytes, returns that many as uint8."""


class Portion(NamedTuple):
    """A param in a slot."""

    name: str
    segment: int
    """The number of its segment among the trained ones of the block."""
    start: int
    """Position of its first element in the segment."""
    shape: tuple[int, ...]
    padding: slice
    """Elements of the segment behind the param, which are zeros."""

    @property
    def num_elements(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def padded_elements(self) -> int:
        """Elements that it takes up in a slot."""
        return -(-self.num_elements // ALIGN) * ALIGN


class GradSlots:
    """Buffers for gradients, one per slot."""

    def __init__(
        self,
        layout: Layout,
        users: Mapping[SlotId, Sequence[int]],
        allocate: Allocate,
        *,
        gathered: str | None = None,
        least: Mapping[int, int] | None = None,
    ) -> None:
        """`users` are the tenants of each slot.

        The param `gathered` has as many rows as `reserve` says; its slot begins there. `least` has
        the bytes that else is in the slot of a block, if any.
        """
        self._least = least or {}
        self.layout = layout
        self._users = users
        self._allocate = allocate
        self._gathered = gathered
        self._num_rows = 0
        self.buffers: dict[SlotId, Tensor] = {}
        """The memory of each slot, in fp32. (elements,)"""
        self.portions: dict[int, list[Portion]] = {}
        """The params of each tenant, as they follow on each other in its slot."""
        self.views: dict[int, dict[str, Tensor]] = {}
        """The same as views into the slot, by param, in their own shapes."""
        self._rows_slot = None if gathered is None else self._slot_with(gathered)
        for slot in users:
            if slot != self._rows_slot:
                self._make_room(slot)

    def __iter__(self) -> Iterator[SlotId]:
        return iter(self._users)

    def reserve(self, num_rows: int) -> None:
        """Make room for so many rows of the param `gathered`, and for what was released.

        Nobody may hold a view of its slot. A slot that grows is another buffer, with other views.
        """
        self._num_rows = num_rows
        for slot in self._users:
            if slot == self._rows_slot or slot not in self.buffers:
                self._make_room(slot)

    def release(self) -> None:
        """Give up all memory until the next `reserve`. Nobody may hold a view of it."""
        self.views.clear()
        self.buffers.clear()

    def _slot_with(self, name: str) -> SlotId | None:
        block = self.layout.places[name].segment.block
        return next((slot for slot, users in self._users.items() if block in users), None)

    def _make_room(self, slot: SlotId) -> None:
        """Lay out the slot's tenants; allocate it if it is not large enough for them."""
        tenants = self._users[slot]
        self.portions |= {tenant: list(self._portions_of(tenant)) for tenant in tenants}
        sizes = (4 * sum(p.padded_elements for p in self.portions[tenant]) for tenant in tenants)
        needed = max(*sizes, *(self._least.get(tenant, 0) for tenant in tenants))
        if slot not in self.buffers or self.buffers[slot].nbytes < needed:
            for tenant in tenants:  # views keep the memory of a smaller buffer
                self.views.pop(tenant, None)
            self.buffers.pop(slot, None)
            self.buffers[slot] = self._allocate(needed).view(torch.float32)
        for tenant in tenants:
            self.views[tenant] = _views(self.buffers[slot], self.portions[tenant])

    def _portions_of(self, tenant: int) -> Iterator[Portion]:
        for number, segment in enumerate(self.layout.trained_segments(tenant)):
            for place in self.layout.segment_places(segment):
                name, shape = place.param.name, tuple(place.param.shape)
                if name == self._gathered:
                    shape = (self._num_rows, *shape[1:])
                padding = slice(place.start + place.param.num_elements, place.padded_stop)
                yield Portion(name, number, place.start, shape, padding)


def _views(buffer: Tensor, portions: Sequence[Portion]) -> dict[str, Tensor]:
    views, start = {}, 0
    for portion in portions:
        views[portion.name] = buffer[start : start + portion.num_elements].view(portion.shape)
        start += portion.padded_elements
    return views
