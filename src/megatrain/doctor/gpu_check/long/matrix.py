"""Part `matrix`: what each choice brings, one at a time, from a usual step of the blocks of 8B.

The usual step is packed, by eager kernels, with late updates, the tape on the host and two slots.
All else is compared with it. Each point has the plan's prediction beside it.

Laws (tests/doctor/gpu_check/long/test_matrix.py)
    1. A choice that the device cannot do, or that has no time left, is a row that says why.
    2. What is done is kept before the next point begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from megatrain.doctor.gpu_check.failing import failed_check, may_have_lost_device
from megatrain.doctor.gpu_check.long.given import Given
from megatrain.doctor.gpu_check.long.kernels_agree import OTHERS
from megatrain.doctor.gpu_check.long.long_model import (
    LongModel,
    Steps,
    long_model,
    step_facts,
    steps_of,
)
from megatrain.planning.simulate import simulate
from megatrain.step.settings import StepSettings
from megatrain.text import count, figure

NUM_STEPS = 3
LOST = "a point before it may have lost the device"
POINT_S = 8.0
"""A point is not begun with less, on a device that is measured in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One choice that differs from the usual step."""

    name: str
    times: float = 1.0
    """Tokens, over those of the usual step."""
    packed: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ."""
    needs: str = ""
    """Package without which it is left out."""


POINTS = (
    Point(name="usual"),
    Point(name="not packed", packed=False),
    Point(name="liger", changes=OTHERS["liger"].settings, needs=OTHERS["liger"].package),
    Point(
        name="compile, not packed",
        packed=False,
        changes=OTHERS["compile"].settings,
        needs=OTHERS["compile"].package,
    ),
    Point(name="half the tokens", times=0.5),
    Point(name="twice the tokens", times=2),
    Point(name="four times the tokens", times=4),
    Point(name="tape on the device", changes={"tape": "device"}),
    Point(name="three slots", changes={"slots": 3}),
    Point(name="four updates ahead of the norm", changes={"speculated_blocks": 4}),
    Point(name="updates in backward", changes={"update": "in_backward"}),
)


def measure(given: Given) -> dict[str, Any]:
    """Return a row for each point."""
    model = long_model(given.profile, given.scale)
    steps, rows = steps_of(given, model), list[dict[str, Any]]()
    for row in _rows(given, model, steps):
        rows.append(row)
        given.keep(_found(model, rows))
    return _found(model, rows)


def _rows(given: Given, model: LongModel, steps: Steps) -> Iterator[dict[str, Any]]:
    lost = ""
    for point in POINTS:
        tokens = int(point.times * model.step_tokens)
        about = {"choice": point.name, "tokens": tokens}
        if lost or given.left_s() < given.scale * POINT_S:
            why = lost or "no time was left"
        elif point.needs and find_spec(point.needs) is None:
            why = f"the package {point.needs} is not installed"
        else:
            given.say(f"{point.name}, {count(tokens)} tokens")
            settings = model.settings(**point.changes)
            try:
                yield about | _timed(given, model, steps, point, settings)
                continue
            except Exception as error:
                failed = failed_check("fast", point.name, error)
                why = failed.found
                lost = LOST if may_have_lost_device(failed) else ""
        yield about | {"left_out": why}


def _timed(
    given: Given, model: LongModel, steps: Steps, point: Point, settings: StepSettings
) -> dict[str, Any]:
    tokens = int(point.times * model.step_tokens)
    batch = model.with_step(tokens, packed=point.packed).batch()
    step_s, trace, peak_bytes = steps.time(settings, batch, NUM_STEPS)
    workload = model.workload(
        tokens, packed=point.packed, compiled=settings.compile, kernels=settings.kernels
    )
    predicted_s = simulate(given.profile, workload, settings).step_s
    facts = step_facts(step_s, trace, tokens)
    return facts | {"predicted_s": predicted_s, "peak_device_bytes": peak_bytes}


def _found(model: LongModel, rows: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {row["choice"]: row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    lead = "No point was measured."
    if rates:
        best = max(rates, key=lambda name: rates[name])
        lead = f"Fastest: {best}, {figure(rates[best])} tokens/s of {len(rates)} measured points."
    return {"lead": lead, "figures": model.facts(), "tables": {"Choices": [*rows]}}
