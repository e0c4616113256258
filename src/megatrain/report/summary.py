"""A run in one sentence, and the figures it rests on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from megatrain.planning.prediction import predicted_time
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
    name = "reward" if run.objective == "reward" else "loss"
    if values := _finite(run.curve(name)):
        sentence += f": the {name} went from {figure(values[0][1])} to {figure(values[-1][1])}"
        if run.curve(name)[-1] != values[-1]:
            sentence += f", and is not a number after step {count(values[-1][0])}"
    limit = limits(run)
    return f"{sentence}; {limit}." if limit else f"{sentence}."


def limits(run: Run) -> str:
    """Return what the steps spend most of their time on, and the setting that would change it."""
    shares = run.split_shares()
    if not shares:
        return ""
    names = _WORK | ({"data": "sampling answers"} if run.objective == "reward" else {})
    most, *others = sorted(shares, key=lambda part: -shares[part])
    text = f"{percent(shares[most])} of step time is {names.get(most, most)}"
    if most != "compute":
        return text + _WAYS_OUT.get(most, "")
    if not others:
        return text
    return f"{text}, {percent(shares[others[0]])} {names.get(others[0], others[0])}"


def run_facts(run: Run) -> dict[str, str]:
    """Return the figures that are known, by their names."""
    seconds, tokens = _total(run, "seconds"), _total(run, "num_tokens")
    skipped = [line.step for line in run.steps if not line.applied]
    # Without a share of the roofline the two cannot be compared: something else ran.
    usual, predicted = _usual(run, "seconds"), run.predicted.get("step_s")
    if not _is_compared(run):
        predicted = None
    found = {
        **(_reward_facts(run) if run.objective == "reward" else _loss_facts(run)),
        "Steps": count(run.steps[-1].step) if run.steps else "",
        "Tokens": figure(_total_tokens(run)) if _total_tokens(run) else "",
        "Trained tokens": figure(_total(run, "num_valid_tokens"))
        if run.curve("num_valid_tokens")
        else "",
        "Time in steps": duration(seconds) if seconds else "",
        "Tokens per second": figure(tokens / seconds) if tokens and seconds else "",
        "Time of a step": "" if usual is None else duration(usual),
        "Time of a step, predicted": "" if predicted is None else predicted_time(predicted),
        "Share of the roofline": _share_of_roofline(run),
        "Skipped steps": f"{count(len(skipped))}, the last at step {count(skipped[-1])}"
        if skipped
        else "",
    }
    return {name: text for name, text in found.items() if text}


def _loss_facts(run: Run) -> dict[str, str]:
    """Return the losses of a run that learns from given rows."""
    losses = run.curve("loss")
    return {
        "Loss of the last step": figure(losses[-1][1]) if losses else "",
        "Best loss, smoothed": _best(smoothed(losses), min),
        "Best eval loss": _best(_trained(run.curve("eval_loss")), min),
        "Best eval perplexity": _best(_trained(run.curve("eval_perplexity")), min),
    }


def _reward_facts(run: Run) -> dict[str, str]:
    """Return the rewards of a run that learns from them: its loss is around 0 and says nothing."""
    rewards = run.curve("reward")
    return {
        "Reward of the last step": figure(rewards[-1][1]),
        "Best reward, smoothed": _best(smoothed(rewards), max),
        "Best eval reward": _best(_trained(run.curve("eval_reward")), max),
    }


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _trained(points: Sequence[Point]) -> list[Point]:
    """Return the points after the first step: the best model of a run is one that was trained."""
    return [point for point in points if point[0] > 0]


def _best(points: Sequence[Point], best: Callable[..., Point]) -> str:
    """Return the `min` or `max` of the values and its first step."""
    finite = _finite(points)
    if not finite:
        return ""
    step, value = best(finite, key=lambda point: point[1])
    return f"{figure(value)} at step {count(step)}"


def _total(run: Run, name: str) -> float:
    return math.fsum(value for _, value in _finite(run.curve(name)))


def _total_tokens(run: Run) -> float:
    totals = _finite(run.curve("total_tokens"))
    return totals[-1][1] if totals else _total(run, "num_tokens")


def _is_compared(run: Run) -> bool:
    """Return whether steps were compared with the plan, and not stopped to be on a busy machine."""
    return bool(run.steps) and "of_roofline" in run.steps[-1].values


def _share_of_roofline(run: Run) -> str:
    """Return how near the usual step comes to the least time that the plan's costs allow."""
    share, name = _usual(run, "of_roofline"), run.predicted.get("roofline")
    if share is None or not _is_compared(run):
        return ""
    return f"{percent(share)} ({name})" if name else percent(share)


def _usual(run: Run, name: str) -> float | None:
    """Return the median over steps; the first two warm up."""
    values = [value for _, value in _finite(run.curve(name))]
    return median(values[2:] or values) if values else None
