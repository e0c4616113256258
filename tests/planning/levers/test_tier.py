"""What a setting keeps on disk is what the store keeps there."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.memory.kinds import TensorKind
from megatrain.optim.states import ADAMW
from megatrain.planning.levers.tier import on_disk
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import EIGHT


@pytest.mark.parametrize(
    ("tier", "update", "kinds"),
    [
        ("none", "late", ()),
        ("states", "late", (TensorKind.LO, *ADAMW)),
        ("states", "in_backward", (TensorKind.LO, *ADAMW)),
    ],
)
def test_remainders_and_states_are_on_disk(
    tier: Any, update: Any, kinds: tuple[TensorKind, ...]
) -> None:
    settings = StepSettings(tier=tier, update=update)
    assert on_disk(Workload(model=EIGHT, step_tokens=8), settings) == kinds
