"""Laws of updates.py: only finite gradients are applied, and when a step is half applied."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megatrain.engine.updates import Updates
from megatrain.memory.layout import Segment, build_layout
from megatrain.memory.store import Store
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import WITH_CLIP
from megatrain.optim.views import Treatment, Views
from megatrain.step.ops import OpKind, Role
from megatrain.step.shape import StepShape
from testkit.schedules import op_of

Late = Literal["late", "in_backward"]


class Noting:
    """An optimizer without states that only notes what it is asked to do."""

    states = ()

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, float]] = []

    def treated(self, params: Any) -> dict[str, Treatment]:
        return {param.name: Treatment(1.0, 0.0) for param in params}

    def look_ahead(self, views: Views, gradient: Tensor, *, number: int, scale: float) -> None:
        raise AssertionError("no params have other states than the rest")

    def squared_norm(self, gradient: Tensor) -> float:
        return float(gradient.double().square().sum())

    def clip_factor(self, norm: float) -> float:
        return 1.0 / norm

    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        self.asked.append((step, number, scale))


PARAMS = [Param(name=f"{b}", shape=(2,), dtype=torch.float32, trained=b > 0) for b in range(4)]
BLOCKS = [Block(index=b, role=Role.LAYER, params=(p,)) for b, p in enumerate(PARAMS)]
STORE = Store(build_layout(BLOCKS, WITH_CLIP))
SHAPE = StepShape(num_blocks=4, trained=(False, True, True, True))


def gradient(*values: float) -> list[tuple[Segment, Tensor]]:
    """A gradient of these values, of any block."""
    return [(STORE.layout.trained_segments(1)[0], torch.tensor(values))]


def updates_of(update: Late) -> tuple[Updates, Noting, StepShape]:
    optimizer, shape = Noting(), replace(SHAPE, update=update)
    return Updates(optimizer, STORE, shape), optimizer, shape


def test_the_factor_of_late_updates_is_that_of_all_norms() -> None:
    updates, optimizer, shape = updates_of("late")
    for block, values in {3: (2.0,), 2: (3.0, 6.0), 1: (0.0,)}.items():
        updates.measure(op_of(shape, OpKind.NORM, block), gradient(*values), 5)
    updates.judge(5)
    assert updates.norm == 7.0
    for block in (1, 2, 3):
        updates.apply(op_of(shape, OpKind.UPDATE, block), gradient(1.0))
    assert optimizer.asked == [(5, 1, 1 / 7)] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_late_updates_apply_none_of_a_step_that_is_not_finite(bad: float) -> None:
    updates, optimizer, shape = updates_of("late")
    for block in (3, 2, 1):
        updates.measure(op_of(shape, OpKind.NORM, block), gradient(bad if block == 2 else 1.0), 1)
    updates.judge(1)
    assert updates.faulty_blocks == (2,)
    assert [
        updates.apply(op_of(shape, OpKind.UPDATE, block), gradient(1.0)) for block in (1, 2, 3)
    ] == [0, 0, 0]
    assert optimizer.asked == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_in_backward_the_block_alone_is_left_out_and_counts_no_update(bad: float) -> None:
    updates, optimizer, shape = updates_of("in_backward")
    for step, value in enumerate((bad, 1.0), start=1):
        for block in (3, 2, 1):
            updates.measure(
                op_of(shape, OpKind.NORM, block), gradient(value if block == 2 else 1.0), step
            )
            updates.apply(op_of(shape, OpKind.UPDATE, block), gradient(1.0))
    assert optimizer.asked == [(1, 1, 1.0), (1, 1, 1.0), (2, 2, 1.0), (2, 1, 1.0), (2, 2, 1.0)]


@pytest.mark.parametrize("update", ["late", "in_backward"])
def test_a_step_is_half_applied_from_its_first_update_to_its_last(update: Late) -> None:
    updates, _, shape = updates_of(update)
    for block in (3, 2, 1):
        updates.measure(op_of(shape, OpKind.NORM, block), gradient(1.0), 1)
    if update == "late":
        updates.judge(1)
    seen = []
    for block in (1, 2, 3) if update == "late" else (3, 2, 1):
        updates.apply(op_of(shape, OpKind.UPDATE, block), gradient(1.0))
        seen.append(updates.half_applied)
    assert seen == [True, True, False]


def test_updates_continue_to_count_where_a_restored_state_ended() -> None:
    updates, optimizer, shape = updates_of("in_backward")
    updates.restore({1: 6, 2: 7, 3: 8})
    for block in (3, 2, 1):
        updates.measure(op_of(shape, OpKind.NORM, block), gradient(1.0), 9)
        updates.apply(op_of(shape, OpKind.UPDATE, block), gradient(1.0))
    assert [number for _, number, _ in optimizer.asked] == [9, 8, 7]


def test_without_an_optimizer_nothing_is_measured() -> None:
    updates = Updates(None, STORE, SHAPE)
    updates.measure(op_of(SHAPE, OpKind.NORM, 1), gradient(math.nan), 1)
    assert updates.faulty_blocks == ()
