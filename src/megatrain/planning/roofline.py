"""The roofline of a step: the least time that a plan's costs allow, if no lane ever waited.

Each lane has its own: the sum of the times of its ops alone, on a machine that nothing else uses.
A part does not depend on the tokens of a step (weights in, gradients out, updates), the rest is in
proportion to them. The roofline is the slowest lane's; a measured step is compared with it.

Invariants (tests/planning/test_roofline.py)
    1. No simulated step is shorter than its roofline.
    2. The roofline of fewer tokens is that of a plan for fewer, within the cost of odd sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.planning.simulate import Simulation
from megatrain.step.ops import LANE_NAMES, LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTime:
    """Seconds that one lane takes for a step."""

    step_s: float
    """However many tokens it has."""
    token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The times of all lanes."""

    lanes: Mapping[str, LaneTime]

    def of(self, num_tokens: int) -> tuple[float, str]:
        """Return the least seconds of a step of so many tokens, and what sets them."""
        times = {
            LANE_NAMES[lane]: time.step_s + num_tokens * time.token_s
            for lane, time in self.lanes.items()
        }
        slowest = max(times, key=lambda name: times[name])
        return times[slowest], slowest


def roofline_of(simulation: Simulation) -> Roofline:
    """Return the roofline of a plan, from its simulated step."""
    fixed, growing = dict.fromkeys(LANES, 0.0), dict.fromkeys(LANES, 0.0)
    last = max(i for i, one in enumerate(simulation.ops) if one.op.kind.spec.ends_step)
    for played in simulation.ops[: last + 1]:  # ops behind it belong to the next step
        seconds = fixed if played.op.micro is None else growing
        seconds[played.op.lane] += played.cost.seconds
    return Roofline(
        lanes={
            lane: LaneTime(step_s=fixed[lane], token_s=growing[lane] / simulation.tokens)
            for lane in LANES
        }
    )
