"""The shape of a step says what is wrong with it before any op is made."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.errors import ScheduleError
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape


def test_all_blocks_are_trained_unless_told() -> None:
    shape = StepShape(num_blocks=4)
    assert shape.trained == (True,) * 4
    assert (shape.head, shape.last_layer, shape.lowest, shape.bottom_layer) == (3, 2, 0, 1)


@pytest.mark.parametrize(
    ("trained", "lowest", "bottom_layer"),
    [
        ((False, True, True, True), 1, 1),
        ((False, False, True, False), 2, 2),
        ((False, False, False, True), 3, 3),
    ],
)
def test_backward_ends_at_the_lowest_trained_block(
    trained: tuple[bool, ...], lowest: int, bottom_layer: int
) -> None:
    shape = StepShape(num_blocks=4, trained=trained)
    assert (shape.lowest, shape.bottom_layer) == (lowest, bottom_layer)


def test_the_top_layers_that_backward_visits_keep_their_activations() -> None:
    def kept(count: int, *trained: bool) -> tuple[int, range]:
        shape = StepShape(num_blocks=6, kept_layers=count, trained=trained)
        return shape.lowest_kept, shape.taped_layers

    assert kept(0) == (5, range(1, 5))
    assert kept(2) == (3, range(1, 3))
    assert kept(4) == kept(9) == (1, range(1, 1))
    frozen_below = (False, False, False, True, True, True)
    assert kept(1, *frozen_below) == (4, range(3, 4))
    assert kept(4, *frozen_below) == (3, range(3, 3))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"num_blocks": 2}, "num_blocks is 2, must be at least 3"),
        ({"num_micro": 0}, "num_micro is 0, must be at least 1"),
        ({"slots": 1}, "slots is 1, must be at least 2"),
        ({"grad_slots": 0}, "grad_slots is 0, must be at least 1"),
        ({"tape_slots": 1}, "tape_slots is 1, must be at least 2"),
        ({"kept_layers": -1}, "kept_layers is -1, must be at least 0"),
        ({"host_grads": 1}, "host_grads is 1, must be at least 2"),
        ({"tier_slots": 0}, "tier_slots is 0, must be at least 1"),
        ({"tier": "states"}, "nothing is updated, so nothing is to be read from disk"),
        ({"trained": (True, True)}, "trained has 2 flags for 4 blocks"),
        ({"trained": (False,) * 4}, "no block is trained, so a step would have nothing to do"),
    ],
)
def test_impossible_shapes_are_refused(numbers: dict[str, Any], text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        StepShape(**{"num_blocks": 4, **numbers})
    assert str(caught.value) == text


def test_experts_come_in_pages_where_one_rank_fetches_them() -> None:
    """The sibling: a shape that says otherwise is refused."""
    paged = StepSettings(expert_pages=4)
    assert paged.shape(num_blocks=4, copying=True).pages
    assert not paged.shape(num_blocks=4, copying=False).pages
    assert not paged.shape(num_blocks=4, copying=True, divided=True).pages
    with pytest.raises(ScheduleError, match="fetches into slots"):
        StepShape(num_blocks=4, pages=True, copying=False)
