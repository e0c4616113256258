"""One step of a run: a batch, the engine, and the step's line for metrics.jsonl."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from megatrain.lanes.trace import step_split
from megatrain.planning.bound import Bound
from megatrain.run.interrupts import Requests
from megatrain.run.opening.opening import Opening
from megatrain.run.state import RunState
from megatrain.run.step_time import step_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStep:
    """What a step came to."""

    metrics: dict[str, Any]
    """Its line in metrics.jsonl, but for the tokens of the run."""
    seconds: float | None
    """Without the wait for data; None: it was left out."""


def take_step(
    opened: Opening,
    state: RunState,
    requests: Requests,
    step: int,
    rate: float,
    bound: Bound | None,
) -> TakenStep:
    """Train on the next batch, or leave it out; count it in `state` and judge its loss."""
    began = time.monotonic()
    batch = opened.data.next_batch()
    if (reason := state.left_out.get(step)) is not None:
        opened.engine.leave_out()
        requests.ask()
        metrics = {"step": step, "applied": False, "fault": f"left out: {reason}"}
        return TakenStep(metrics=metrics, seconds=None)
    data_seconds = time.monotonic() - began
    trace = opened.engine.trace
    assert trace is not None
    trace.spans.clear()
    result = opened.engine.step(batch, requests.says)
    requests.hear(result.said)
    seconds = time.monotonic() - began
    split = step_split(trace, seconds, data_seconds)
    metrics = step_metrics(step, result, rate, seconds, split, bound)
    if result.applied:
        spikes = [state.judge("loss", result.loss)]
        if result.grad_norm is not None:
            spikes.append(state.judge("gradient norm", result.grad_norm))
        if found := [spike for spike in spikes if spike is not None]:
            metrics["spike"] = "; ".join(found)
    state.total_tokens += result.num_tokens
    state.first_loss = result.loss if state.first_loss is None else state.first_loss
    state.last_loss = result.loss
    return TakenStep(metrics=metrics, seconds=seconds - data_seconds)
