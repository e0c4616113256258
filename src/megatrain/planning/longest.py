"""The longest row that a machine can train a model with.

Law (tests/planning/test_longest.py): a step of one row of that length fits, one of twice the length
does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.planning.fixes import SHORTEST
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.search import Search
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

LONGEST_ROW = 1 << 22
"""No plan is made for longer ones."""


def longest_row(
    profile: MachineProfile,
    model: ModelShape,
    settings: StepSettings | None = None,
    pins: Mapping[str, str] | None = None,
) -> int:
    """Return the tokens of the longest row that fits, a power of two; 0: none does.

    The step is that one row. Those of `settings` that `pins` names stay.
    """
    length = LONGEST_ROW
    while length >= SHORTEST:
        workload = Workload(model=model, step_tokens=length, sequence=length, packed=True)
        if Search(profile, workload, settings, pins).first_home() is not None:
            return length
        length //= 2
    return 0
