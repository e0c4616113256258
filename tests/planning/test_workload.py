"""A step's tokens in micro-batches, and what of a store is on disk meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.memory.kinds import Kind
from megatrain.optim.states import ADAMW
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import EIGHT


def test_the_last_micro_batch_may_be_smaller() -> None:
    workload = Workload(model=EIGHT, step_tokens=10, sequence=2)
    assert workload.micro_sizes(4) == [4, 4, 2]
    assert workload.num_micro(4) == 3
    assert workload.micro_sizes(5) == [5, 5]


@pytest.mark.parametrize(
    ("tier", "update", "on_disk"),
    [
        ("none", "late", ()),
        ("states", "late", (Kind.LO, *ADAMW)),
        ("gradients", "late", (Kind.LO, *ADAMW, Kind.GRAD)),
        ("gradients", "in_backward", (Kind.LO, *ADAMW)),
    ],
)
def test_gradients_that_wait_for_no_norm_are_not_on_disk(
    tier: Any, update: Any, on_disk: tuple[Kind, ...]
) -> None:
    settings = StepSettings(tier=tier, update=update)
    assert Workload(model=EIGHT, step_tokens=8).kinds_on_disk(settings) == on_disk
