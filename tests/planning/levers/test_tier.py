"""What a setting keeps on disk is what the store keeps there."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.memory.kinds import Kind
from megatrain.optim.states import ADAMW
from megatrain.planning.levers.tier import on_disk
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import EIGHT


@pytest.mark.parametrize(
    ("tier", "update", "kinds"),
    [
        ("none", "late", ()),
        ("states", "late", (Kind.LO, *ADAMW)),
        ("gradients", "late", (Kind.LO, *ADAMW, Kind.GRAD)),
        ("gradients", "in_backward", (Kind.LO, *ADAMW)),
    ],
)
def test_gradients_that_wait_for_no_norm_are_not_on_disk(
    tier: Any, update: Any, kinds: tuple[Kind, ...]
) -> None:
    settings = StepSettings(tier=tier, update=update)
    assert on_disk(Workload(model=EIGHT, step_tokens=8), settings) == kinds
