"""Laws of slots.py: how large gradient slots are, and when they are allocated."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.engine.gradients.slots import GradSlots
from megatrain.memory.layout import ALIGN
from megatrain.step.ops import SlotId
from tests.engine.gradients.made_parts import LAYOUT, empty


class Counted:
    """Memory, and the bytes that were asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, num_bytes: int) -> Tensor:
        self.sizes.append(num_bytes)
        return empty(num_bytes)


def test_a_slot_is_as_large_as_its_largest_user() -> None:
    allocate = Counted()
    GradSlots(LAYOUT, {0: [0], "edge": [1]}, allocate)
    assert allocate.sizes == [4 * 3 * ALIGN, 4 * 4 * ALIGN]


def test_rows_have_the_room_that_was_reserved_and_no_more() -> None:
    allocate = Counted()
    users: dict[SlotId, list[int]] = {0: [0], 1: [1]}
    slots = GradSlots(LAYOUT, users, allocate, gathered="1.0")
    assert allocate.sizes == [4 * 3 * ALIGN]
    for num_rows, needed in ((2, 2 * ALIGN), (3, 0), (6, 3 * ALIGN), (1, 0)):
        del allocate.sizes[:]
        slots.reserve(num_rows)
        assert allocate.sizes == ([4 * needed] if needed else [])
        views = slots.views[1]
        assert views["1.0"].shape == (num_rows, 61)
        views["1.0"].fill_(1.0)
        views["1.1"].fill_(2.0)
        assert (views["1.0"] == 1.0).all()
        assert torch.equal(views["1.1"], torch.full((2, 2), 2.0))
