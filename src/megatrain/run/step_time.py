"""A step's line of metrics."""

from __future__ import annotations

from typing import Any

from megatrain.engine.results import StepResult
from megatrain.planning.bound import Bound


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
        **result.figures,
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
