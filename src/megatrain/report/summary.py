"""A run in one sentence, and the figures it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from megatrain.report.charts import smoothed
from megatrain.report.run import Point, Run
from megatrain.step.ops import PARTS
from megatrain.text import count, duration, figure, percent

_WORK = {**PARTS, "data": "reading data", "other": "other work"}
_WAYS_OUT = dict.fromkeys(PARTS, "; a larger train.batch_tokens hides it") | {
    "issue": "; a larger train.micro_batch_tokens makes it less",
}
"""Waits do not grow with the tokens of a step; the compute that they hide behind does."""


def sentence(run: Run) -> str:
    """Return what the run did and what limits its steps."""
    if not run.steps:
        return "No step has been logged yet."
    parts = [f"{count(run.steps[-1].step)} steps"]
    if tokens := _total_tokens(run):
        parts.append(f"over {figure(tokens)} tokens")
    if seconds := _total(run, "seconds"):
        parts.append(f"in {duration(seconds)} of steps")
    sentence = " ".join(parts)
    if losses := _finite(run.curve("loss")):
        sentence += f": the loss went from {figure(losses[0][1])} to {figure(losses[-1][1])}"
        if run.curve("loss")[-1] != losses[-1]:
            sentence += f", and is not a number after step {count(losses[-1][0])}"
    limit = limits(run)
    return f"{sentence}; {limit}." if limit else f"{sentence}."


def limits(run: Run) -> str:
    """Return what the steps spend most of their time on, and the setting that would change it."""
    shares = run.split_shares()
    if not shares:
        return ""
    names = _WORK | ({"data": "drawing answers"} if run.curve("reward") else {})
    most, *others = sorted(shares, key=lambda part: -shares[part])
    text = f"{names.get(most, most)} limits the step with {percent(shares[most])} of its time"
    if most != "compute":
        return text + _WAYS_OUT.get(most, "")
    if not others:
        return text
    return (
        f"{text}, followed by {names.get(others[0], others[0])} with {percent(shares[others[0]])}"
    )


def run_facts(run: Run) -> dict[str, str]:
    """Return the figures that are known, by their names."""
    seconds, tokens = _total(run, "seconds"), _total(run, "num_tokens")
    skipped = [line.step for line in run.steps if not line.applied]
    found = {
        "Loss of the last step": figure(run.curve("loss")[-1][1]) if run.curve("loss") else "",
        "Best loss, smoothed": _best(smoothed(run.curve("loss"))),
        "Best eval loss": _best(_trained(run.curve("eval_loss"))),
        "Best eval perplexity": _best(_trained(run.curve("eval_perplexity"))),
        "Steps": count(run.steps[-1].step) if run.steps else "",
        "Tokens": figure(_total_tokens(run)) if _total_tokens(run) else "",
        "Trained tokens": figure(_total(run, "num_trained")) if run.curve("num_trained") else "",
        "Time in steps": duration(seconds) if seconds else "",
        "Tokens per second": figure(tokens / seconds) if tokens and seconds else "",
        "Time of a step": _step_time(run),
        "Share of the bound": _share_of_bound(run),
        "Skipped steps": f"{count(len(skipped))}, the last at step {count(skipped[-1])}"
        if skipped
        else "",
    }
    return {name: text for name, text in found.items() if text}


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _trained(points: Sequence[Point]) -> list[Point]:
    """Return the points after the first step: the best model of a run is one that was trained."""
    return [point for point in points if point[0] > 0]


def _best(points: Sequence[Point]) -> str:
    finite = [(value, step) for step, value in _finite(points)]
    if not finite:
        return ""
    value, step = min(finite)
    return f"{figure(value)} at step {count(step)}"


def _total(run: Run, name: str) -> float:
    return math.fsum(value for _, value in _finite(run.curve(name)))


def _total_tokens(run: Run) -> float:
    totals = _finite(run.curve("total_tokens"))
    return totals[-1][1] if totals else _total(run, "num_tokens")


def _step_time(run: Run) -> str:
    """Return the usual time of a step against its prediction; nothing if it had none."""
    predicted, measured = run.predicted.get("step_s"), _usual(run, "seconds")
    if predicted is None or measured is None:
        return ""
    return f"{duration(measured)}, {duration(predicted)} predicted"


def _share_of_bound(run: Run) -> str:
    """Return how near the usual step comes to the least time that the plan's costs allow."""
    share, name = _usual(run, "of_bound"), run.predicted.get("bound")
    if share is None:
        return ""
    return f"{percent(share)} ({name})" if name else percent(share)


def _usual(run: Run, name: str) -> float | None:
    """Return the median over steps; the first two warm up."""
    values = [value for _, value in _finite(run.curve(name))]
    return median(values[2:] or values) if values else None
