"""The model whose step is timed: as many parameters as asked for, or what memory and time allow.

A step is to take at most STEP_S on the rate that was measured: few tokens on a processor, many on a
large card, so that the check as a whole stays short. The planner chooses how the step runs, as it
does for training, and predicts its time.

Laws (tests/doctor/gpu_check/test_sizes.py)
    1. The model has the parameters that were asked for within a tenth, where they fit.
    2. Its plan fits; what was reduced is reported, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.doctor.timed_step import TimedModel
from megatrain.errors import DoesNotFit
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.machine.reserve import with_one_budget
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.shapes import Dtype
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.search import Search, shortfall_texts
from megatrain.planning.workload import Workload
from megatrain.text import figure

STEP_S = 3.0
REDUCED_S = 1.2
"""Seconds of a step of the fewest tokens, by which a slow device gets a smaller model."""
LEAST_TOKENS, MOST_TOKENS = 512, 65536
LEAST_PARAMS = 1_000_000
_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LEAST_LAYERS = 8
"""Fewer would not show overlap: the last two are still in their slots at the turn."""

_PINS = {"state": "the step is timed with exact states", "tier": "the step is timed in memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStep:
    """The step to be timed."""

    model: TimedModel
    plan: Plan
    reduced: str
    """Why it has fewer parameters than asked for; empty if it has not."""


def step_for(profile: MachineProfile, params: int) -> ChosenStep:
    """Return the step for a model of so many parameters, or of fewer. Raises DoesNotFit."""
    profile = with_one_budget(profile)
    dtype: Dtype = "fp32" if profile.fp32_efficiency > 1 else "bf16"
    flops = max(point.flops for point in profile.forward_flops)
    flops *= profile.fp32_efficiency if dtype == "fp32" else 1.0
    tokens, reduced = _tokens(params, flops), ""
    if 8 * params * tokens / flops > STEP_S:
        params, reduced = int(REDUCED_S * flops / (8 * tokens)), "a step would take too long"
    while params >= LEAST_PARAMS:
        shaped = shaped_model(params, tokens)
        workload = Workload(
            model=shape_of(TimedModel(**shaped, rows=1, num_micro=1, dtype=dtype).decoder()),
            step_tokens=tokens,
            sequence=shaped["length"],
            dtype=dtype,
        )
        search = Search(profile, workload, pins=_PINS)
        if search.first_home() is not None:
            return _planned(profile, workload, shaped, reduced)
        ledger = predicted_ledger(profile, workload, search.smallest())
        lacks = ", ".join(f"{text} short" for text in shortfall_texts(profile, ledger))
        params, reduced = params // 2, f"{figure(params)} parameters do not fit: {lacks}"
    raise DoesNotFit(f"gpu-check: {reduced or 'no model is small enough for this device'}")


def _planned(
    profile: MachineProfile, workload: Workload, shaped: Mapping[str, Any], reduced: str
) -> ChosenStep:
    plan = make_plan(profile, workload, pins=_PINS)
    rows = max(1, plan.settings.micro_batch_tokens // workload.sequence)
    num_micro = max(1, workload.step_tokens // (rows * workload.sequence))
    model = TimedModel(**shaped, rows=rows, num_micro=num_micro, dtype=workload.dtype)
    return ChosenStep(model=model, plan=plan, reduced=reduced)


def shaped_model(params: int, tokens: int) -> dict[str, Any]:
    """Return the sizes of a Llama with about so many parameters, by fields of TimedModel."""
    vocabulary = 32000 if params >= 4e8 else 8192 if params >= 3e7 else 1024
    layers = {width: (params - 2 * vocabulary * width) // (16 * width**2) for width in _WIDTHS}
    deep = [width for width in _WIDTHS if layers[width] >= _LEAST_LAYERS]
    width = max(deep, default=_WIDTHS[0])
    heads = max(1, width // (128 if width >= 1024 else 64))
    return {
        "layers": max(2, layers[width]),
        "hidden": width,
        "intermediate": 4 * width,
        "heads": heads,
        "kv_heads": heads,
        "vocabulary": vocabulary,
        "length": 2048 if tokens >= 8192 else LEAST_TOKENS // 2,
    }


def _tokens(params: int, flops: float) -> int:
    """Return a power of two of tokens whose step takes about STEP_S, within limits."""
    tokens = LEAST_TOKENS
    while 2 * tokens <= MOST_TOKENS and 8 * params * 2 * tokens / flops <= STEP_S:
        tokens *= 2
    return tokens
