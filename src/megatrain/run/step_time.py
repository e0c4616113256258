"""Where a step's time went: compute, and what compute waited for."""

from __future__ import annotations

from typing import Any

from megatrain.engine.batch import StepResult
from megatrain.lanes.trace import Trace
from megatrain.planning.bound import Bound
from megatrain.step.ops import PARTS


def step_metrics(
    step: int,
    result: StepResult,
    rate: float,
    seconds: float,
    split: dict[str, float],
    bound: Bound | None,
) -> dict[str, Any]:
    """Return a step's line of metrics.jsonl; a bound is known where the machine was measured."""
    metrics: dict[str, Any] = {
        "step": step,
        "loss": result.loss,
        **({} if result.aux_loss is None else {"aux_loss": result.aux_loss}),
        "grad_norm": result.grad_norm,
        "learning_rate": rate,
        "num_tokens": result.num_tokens,
        "num_trained": result.num_trained,
        "seconds": round(seconds, 6),
        "tokens_per_s": round(result.num_tokens / seconds, 3),
        "split": split,
        "applied": result.applied,
    }
    if bound is not None:
        least_s, name = bound.of(result.num_tokens)
        metrics |= {"of_bound": round(least_s / seconds, 4), "bound": name}
    if result.fault is not None:
        metrics["fault"] = str(result.fault)
    return metrics


def step_split(trace: Trace, seconds: float, data_seconds: float) -> dict[str, float]:
    """Return the seconds of a step by cause; they add up to `seconds`, data included.

    `trace` has the spans of this step alone. Whatever compute did not wait for counts as compute.
    """
    split = dict.fromkeys((*PARTS, "data"), 0.0)
    for summary in trace.step_summaries():
        for kind, waited in summary.compute_waited_s.items():
            split[kind.spec.part] += waited
    split["data"] = data_seconds
    split["compute"] = max(0.0, seconds - sum(split.values()) + split["compute"])
    return {name: round(value, 6) for name, value in split.items()}
