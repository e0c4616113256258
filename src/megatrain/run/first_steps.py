"""The first steps of a run against its plan: printed once, and kept as rates for the next plan.

A run on a machine that was measured is watched for ten steps. The first two warm up; of the others
every kind of op has its seconds in a step, as the lanes measured and as the plan predicted. What
the times say of the machine's rates goes into the kept profile (doctor/refine.py).

Laws (tests/run/test_first_steps.py)
    1. A run whose machine has a wrong rate corrects it, and says so; the next plan is nearer.
    2. Of several ranks, and where nothing was measured, nothing is watched.
    3. A cache that cannot be written ends nothing.
    4. Rates of a machine that is busy with something else are not kept, a line says so, and nothing
       is compared with the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.batch import MicroBatch
from megatrain.errors import DiskError
from megatrain.lanes.trace import Trace
from megatrain.planning.plan import Plan
from megatrain.planning.prediction import predicted_time
from megatrain.text import duration

if TYPE_CHECKING:
    from megatrain.doctor.refine import StepTrace
    from megatrain.run.opening.opening import Opening

WATCHED_STEPS = 10
WARM_UP_STEPS = 2
LEAST_STEPS = 3
"""Fewer, beyond those that warm up, tell nothing."""
_SHOWN = 6
"""Kinds of op that take most of their lanes' time."""


def watched_steps(opened: Opening) -> WatchedSteps | None:
    """Return what watches a run; None: there is no prediction of its time, or it has ranks."""
    plan, ranks = opened.plan, opened.ranks
    if not (plan.knows_time and plan.fits and ranks.owner.is_alone):
        return None
    return WatchedSteps(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOps:
    """Predicted and measured seconds by kind of op."""

    rows: Sequence[Mapping[str, Any]]
    """Seconds of a step, by `op`, `measured_s` and `predicted_s`."""
    num_steps: int
    step_s: float
    predicted_s: float
    kept: str
    """What became of the rates, for people; empty if they say nothing new."""
    is_busy: bool
    """Something else ran: the steps tell nothing of the prediction."""

    def lines(self) -> list[str]:
        """Return a few lines for people; on a busy machine only that it is busy."""
        if self.is_busy:
            return [self.kept]
        step = f"step {duration(self.step_s)} ({predicted_time(self.predicted_s)})"
        parts = [
            f"{row['op']} {duration(row['measured_s'])} ({predicted_time(row['predicted_s'])})"
            for row in sorted(self.rows, key=lambda row: -row["measured_s"])[:_SHOWN]
        ]
        half = (len(parts) + 1) // 2
        lines = [
            f"measured over {self.num_steps} steps (predicted in parentheses): {step}",
            *(", ".join(some) for some in (parts[:half], parts[half:]) if some),
        ]
        return [*lines, self.kept] if self.kept else lines


class WatchedSteps:
    """Collects the steps of a run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps: list[StepTrace] = []
        self._num_seen = 0

    @property
    def is_full(self) -> bool:
        return self._num_seen >= WATCHED_STEPS

    def add(self, trace: Trace, batch: Sequence[MicroBatch], seconds: float) -> None:
        """Take the spans of a step that was just done."""
        from megatrain.doctor.refine import StepTrace

        self._num_seen += 1
        if self._num_seen > WARM_UP_STEPS:
            sizes = tuple(micro.input_ids.numel() for micro in batch)
            spans = tuple(trace.spans)  # with the updates that the step before left
            self._steps.append(StepTrace(spans=spans, micro_tokens=sizes, seconds=seconds))

    def compared(self) -> ComparedOps | None:
        """Return the comparison, and keep the rates; None if there were too few steps."""
        from megatrain.doctor.refine import disturbed, keep_refined, op_times, refined

        if len(self._steps) < LEAST_STEPS:
            return None
        plan, kept = self._plan, ""
        found, why = refined(plan, self._steps), disturbed(self._steps)
        if why:
            kept = f"not saving the measurements of these steps: {why}"
        elif found.figures:
            figures = ", ".join(name.replace("_", " ") for name in found.figures)
            try:
                origin = f"a run of {plan.workload.model.name}"
                if keep_refined(found, origin):
                    kept = f"kept for the next plan: {figures}"
            except DiskError as error:
                kept = f"not saving the measurements of these steps: {error}"
        seconds = sorted(step.seconds for step in self._steps)
        return ComparedOps(
            rows=op_times(plan, self._steps),
            num_steps=len(self._steps),
            step_s=seconds[len(seconds) // 2],
            predicted_s=plan.step_s,
            kept=kept,
            is_busy=bool(why),
        )
