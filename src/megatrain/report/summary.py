"""A run in one sentence, and the figures it rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.thinning import Point, smoothed
from megatrain.report.run import Run, number
from megatrain.report.tables import facts_table
from megatrain.report.time_split import split_shares
from megatrain.step.ops import PARTS
from megatrain.text import count, duration, figure, percent

_WORK = {**PARTS, "data": "reading data", "other": "other work"}
_WAYS_OUT = dict.fromkeys(PARTS, "; a larger train.batch_tokens hides it") | {
    "issue": "; a larger train.micro_batch_tokens makes it less",
}
"""Waits do not grow with the tokens of a step; the compute that they hide behind does."""


def summary_section(runs: Sequence[Run]) -> Html:
    """Return a sentence for each run, their figures, and what could not be read."""
    sentences = [sentence(run) for run in runs]
    if len(runs) > 1:
        lead = [
            tag("p", tag("b", f"{run.name}: "), text)
            for run, text in zip(runs, sentences, strict=True)
        ]
        figures = facts_table(runs, [run_facts(run) for run in runs], "Summary of the runs")
    else:
        lead = [tag("p", sentences[0], class_="lead")]
        figures = _cards(runs[0])
    notes = (tag("p", f"{run.name}: {note}.", class_="note") for run in runs for note in run.notes)
    return join_html([*lead, figures, *notes])


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
    shares = split_shares(run)
    if not shares:
        return ""
    most = max(shares, key=lambda part: shares[part])
    names = _WORK | ({"data": "drawing answers"} if run.curve("reward") else {})
    if most != "compute":
        work = names.get(most, most)
        limit = f"{work} limits the step with {percent(shares[most])} of its time"
        return limit + _WAYS_OUT.get(most, "")
    sentence = f"compute limits the step with {percent(shares[most])} of its time"
    waits = {part: share for part, share in shares.items() if part != "compute"}
    if not waits:
        return sentence
    longest = max(waits, key=lambda part: waits[part])
    return f"{sentence}, followed by {names.get(longest, longest)} with {percent(waits[longest])}"


def run_facts(run: Run) -> dict[str, str]:
    """Return the figures of the summary that are known, by their names."""
    losses = _finite(run.curve("loss"))
    found = {
        "Loss of the last step": _last(run.curve("loss")),
        "Best loss, smoothed": _best(smoothed(losses)),
        "Best eval loss": _best(_trained(run.curve("eval_loss"))),
        "Best eval perplexity": _best(_trained(run.curve("eval_perplexity"))),
        "Steps": count(run.steps[-1].step) if run.steps else "",
        "Tokens": _figure(_total_tokens(run) or None),
        "Trained tokens": _figure(_total(run, "num_trained") or None),
        "Time in steps": duration(_total(run, "seconds")) if _total(run, "seconds") else "",
        "Tokens per second": _figure(_rate(run)),
        "Time of a step": _step_time(run),
        "Share of the bound": _share_of_bound(run),
        "Skipped steps": _not_applied(run),
    }
    return {name: text for name, text in found.items() if text}


def _cards(run: Run) -> Html:
    cards = (tag("div", tag("dt", name), tag("dd", text)) for name, text in run_facts(run).items())
    return tag("dl", *cards, class_="cards")


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _trained(points: Sequence[Point]) -> list[Point]:
    """Return the points after the first step: the best model of a run is one that was trained."""
    return [point for point in points if point[0] > 0]


def _last(points: Sequence[Point]) -> str:
    if not points:
        return ""
    value = points[-1][1]
    return figure(value) if math.isfinite(value) else "not a number"


def _best(points: Sequence[Point]) -> str:
    finite = [(value, step) for step, value in _finite(points)]
    if not finite:
        return ""
    value, step = min(finite)
    return f"{figure(value)} at step {count(step)}"


def _total(run: Run, name: str) -> float:
    return math.fsum(value for _, value in run.curve(name) if math.isfinite(value))


def _total_tokens(run: Run) -> float:
    totals = [value for _, value in run.curve("total_tokens") if math.isfinite(value)]
    return totals[-1] if totals else _total(run, "num_tokens")


def _rate(run: Run) -> float | None:
    """Return tokens per second over all logged steps."""
    pairs = [
        (line.values["num_tokens"], line.values["seconds"])
        for line in run.steps
        if math.isfinite(
            line.values.get("num_tokens", math.nan) + line.values.get("seconds", math.nan)
        )
    ]
    seconds = math.fsum(pair[1] for pair in pairs)
    return math.fsum(pair[0] for pair in pairs) / seconds if seconds > 0 else None


def _step_time(run: Run) -> str:
    """Return the usual time of a step against its prediction; nothing if it had none."""
    predicted, measured = number(run.predicted.get("step_s")), _usual(run, "seconds")
    if predicted is None or measured is None:
        return ""
    return f"{duration(measured)}, {duration(predicted)} predicted"


def _share_of_bound(run: Run) -> str:
    """Return how near the usual step comes to the least time that the plan's costs allow."""
    share, name = _usual(run, "of_bound"), run.predicted.get("bound")
    if share is None:
        return ""
    return f"{percent(share)} ({name})" if isinstance(name, str) else percent(share)


def _usual(run: Run, name: str) -> float | None:
    """Return the median over steps; the first two warm up."""
    values = [value for _, value in run.curve(name) if math.isfinite(value)]
    return median(values[2:] or values) if values else None


def _not_applied(run: Run) -> str:
    steps = [line.step for line in run.steps if not line.applied]
    if not steps:
        return ""
    return f"{count(len(steps))}, the last at step {count(steps[-1])}"


def _figure(value: float | None) -> str:
    return "" if value is None else figure(value)
