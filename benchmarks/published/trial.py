"""The simulator on trial: predicted against published.

    published   tokens/s
    predicted   the system's own schedule on its machine (playing.py)
    error       predicted over published, less 1
    ours        our engine on that machine, with fused kernels (train.kernels) where theirs were
    ceiling     ours with perfect kernels: products at the sustained rate, attention as fast,
                element-wise work and starting ops free; link, DRAM, optimizer and schedule remain

A ceiling below what was reached means that a profile or the simulator is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmarks.published.claims import CLAIMS
from benchmarks.published.playing import predicted_speed
from benchmarks.published.points import EXPLAINED, LEFT_OUT, POINTS, SOURCES, Point
from benchmarks.published.systems import SYSTEMS
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.simulate import Simulation, simulate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

FAR = 0.25
"""An error beyond this one needs an explanation."""
LONG_STEP = 131072
"""Steps of ours are no longer, unless a row is: copies and updates have hidden by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One point and its prediction."""

    point: Point
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.point.published - 1

    @property
    def is_far(self) -> bool:
        return abs(self.error) > FAR


def verdicts() -> list[Verdict]:
    return [Verdict(point=point, predicted=predicted_speed(point)) for point in POINTS]


def since_async(verdict: Verdict) -> Verdict | None:
    """Return the prediction for ZeRO-3 as it is now, beside what was published before."""
    if verdict.point.system != "ZeRO-3":
        return None
    point = replace(verdict.point, system="ZeRO-3 async")
    return Verdict(point=point, predicted=predicted_speed(point))


def median_error(found: Sequence[Verdict]) -> float:
    return median(abs(verdict.error) for verdict in found)


def error_at(found: Sequence[Verdict], share: float) -> float:
    """Return the error that so large a share of the points does not exceed."""
    errors = sorted(abs(verdict.error) for verdict in found)
    return errors[math.ceil(share * len(errors)) - 1]


def share_near(found: Sequence[Verdict]) -> float:
    """Return the share of points whose error is not far."""
    return sum(not verdict.is_far for verdict in found) / len(found)


def perfect(profile: MachineProfile) -> MachineProfile:
    """Return the machine with kernels that nothing can beat."""
    return profile.changed(device_bytes_per_s=1e18, attention_efficiency=1.0, op_overhead_s=1e-9)


def ours(point: Point) -> Simulation:
    """Return our engine's step on the point's machine: the fastest of the usual ways."""
    return best(point, point.exact_profile)


def ceiling(point: Point) -> float:
    """Return the tokens/s of ours with perfect kernels, with activations kept if theirs were."""
    kept = 0 if point.again == "layers" else point.shape.num_layers
    return best(point, perfect(point.profile), kept_layers=kept).tokens_per_s


def best(point: Point, profile: MachineProfile, kept_layers: int = 0) -> Simulation:
    tokens = min(point.step, max(LONG_STEP, point.sequence))
    workload = Workload(
        model=point.shape,
        step_tokens=tokens,
        sequence=point.sequence,
        kernels="liger" if point.fused else "none",
    )
    ways = (way.changed(kept_layers=kept_layers) for way in _ways(tokens, point.sequence))
    played = (simulate(profile, workload, way) for way in ways)
    return max(played, key=lambda one: one.tokens_per_s)


def _ways(tokens: int, sequence: int) -> Iterator[StepSettings]:
    """Yield the usual settings; in a long step updates hide, and large micro-batches are best."""
    is_long = tokens >= LONG_STEP
    for size in {16384} if is_long else {8192, 16384}:
        micro = max(min(tokens, size), min(tokens, sequence))
        way = StepSettings(micro_batch_tokens=micro, tape="host", update="in_backward")
        yield way
        if not is_long:
            yield way.changed(update="late")


def facts() -> dict[str, Any]:
    """Return the trial for programs."""
    found = verdicts()
    known = [verdict for verdict in found if not verdict.point.step_is_assumed]
    return {
        "num_points": len(found),
        "median_error": round(median_error(found), 4),
        "error_of_nine_in_ten": round(error_at(found, 0.9), 4),
        "within_25_percent": round(share_near(found), 4),
        "with_given_steps": {
            "num_points": len(known),
            "median_error": round(median_error(known), 4),
            "within_25_percent": round(share_near(known), 4),
        },
        "points": [_facts(verdict) for verdict in found],
        "zero_3_async": {
            now.point.name: round(now.predicted, 1) for now in filter(None, map(since_async, found))
        },
        "claims": [asdict(claim) | {"predicted": claim.predicted()} for claim in CLAIMS],
        "schedules": {name: system.why for name, system in SYSTEMS.items()},
        "left_out": LEFT_OUT,
    }


def _facts(verdict: Verdict) -> dict[str, Any]:
    point = verdict.point
    told = {"explained": EXPLAINED[point.name]} if verdict.is_far else {}
    return {
        "name": point.name,
        "source": SOURCES[point.source],
        "step_is_assumed": point.step_is_assumed,
        "published": round(point.published, 1),
        "predicted": round(verdict.predicted, 1),
        "error": round(verdict.error, 4),
        "ours": round(ours(point).tokens_per_s, 1),
        "ceiling": round(ceiling(point), 1),
    } | told
