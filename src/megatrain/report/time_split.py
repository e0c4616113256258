"""The parts of a step's time: shares over the run, and seconds from step to step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from megatrain.report.drawing.axis import step_axis, value_axis
from megatrain.report.drawing.chart import frame, legend, path
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.thinning import averaged
from megatrain.report.run import Run
from megatrain.report.tables import table
from megatrain.step.ops import PARTS
from megatrain.text import duration, percent

_KNOWN = frozenset({*PARTS, "data"})
_MOST_COLUMNS = 100
_WARM_UP_STEPS = 1
"""The first step allocates and compiles: it is drawn, but left out of the shares."""


def split_shares(run: Run) -> dict[str, float]:
    """Return the shares of the time of a step by kind of work; empty if none was recorded."""
    lines = run.steps[_WARM_UP_STEPS:] or run.steps
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for part, value in line.split.items():
            seconds[part] += value
    total = math.fsum(seconds.values())
    return {part: value / total for part, value in seconds.items()} if total > 0 else {}


def split_section(runs: Sequence[Run]) -> Html:
    """Return a bar of shares for each run, and below it the seconds over steps."""
    parts = [part for part in (_run(run, len(runs)) for run in runs) if part]
    return tag("div", *parts, class_="charts") if len(parts) > 1 else join_html(parts)


def _run(run: Run, num_runs: int) -> Html:
    shares = split_shares(run)
    if not shares:
        return Html()
    name = (tag("h3", run.name),) if num_runs > 1 else ()
    return tag("div", *name, share_bar(shares), _chart(run, list(shares)), _ops(run))


def _ops(run: Run) -> Html:
    """Return the kinds of op of a step, measured over the first steps and as predicted."""
    rows = [
        tag(
            "tr",
            tag("th", op.kind, scope="row"),
            tag("td", duration(op.measured_s), class_="number"),
            tag("td", duration(op.predicted_s), class_="number"),
        )
        for op in sorted(run.ops, key=lambda op: -op.measured_s)
    ]
    if not rows:
        return Html()
    caption = tag("figcaption", "Ops of a step", tag("span", " side by side", class_="unit"))
    head = ["op", "measured", "predicted"]
    return tag("figure", caption, table(head, rows, "Ops of a step, measured and predicted"))


def share_bar(shares: Mapping[str, float]) -> Html:
    """Return the shares of a step by kind of work as one bar, with a legend."""
    text = ", ".join(f"{part} {percent(share)}" for part, share in shares.items())
    entries = legend((_look(part), f"{part} {percent(share)}") for part, share in shares.items())
    return join_html([_bar(shares, f"Time of a step: {text}"), entries])


def _bar(shares: Mapping[str, float], text: str) -> Html:
    rects, left = [], 0.0
    for part, share in shares.items():
        rects.append(
            tag("rect", class_=_look(part), x=f"{left:.2%}", width=f"{share:.2%}", height="100%")
        )
        left += share
    return tag("svg", tag("title", text), *rects, class_="shares", role="img", aria_label=text)


def _chart(run: Run, parts: Sequence[str]) -> Html:
    """Return the parts on top of each other, one column for a stretch of steps."""
    split = [(line.step, line.split) for line in run.steps if line.split]
    means = {
        part: dict(averaged([(step, of.get(part, 0.0)) for step, of in split], _MOST_COLUMNS))
        for part in parts
    }
    starts = sorted(means[parts[0]])
    if len(starts) < 2:
        return Html()
    ends = [*starts[1:], split[-1][0] + 1]
    tops = [sum(means[part][start] for part in parts) for start in starts]
    steps, values = step_axis([starts[0], ends[-1]]), value_axis(tops, from_zero=True)
    edges = [(steps.place(start), steps.place(end))
             for start, end in zip(starts, ends, strict=True)]  # fmt: skip
    floor = [0.0] * len(starts)
    areas = []
    for part in parts:
        roof = [low + means[part][start] for low, start in zip(floor, starts, strict=True)]
        over = [(x, values.place(y)) for pair, y in zip(edges, roof, strict=True) for x in pair]
        under = [(x, values.place(y)) for pair, y in zip(edges, floor, strict=True) for x in pair]
        areas.append(tag("path", class_=_look(part), d=path(over + under[::-1]) + "Z"))
        floor = roof
    text = (
        f"Seconds of a step by kind of work: from {duration(tops[0])} at the first "
        f"to {duration(tops[-1])} at the last steps"
    )
    caption = tag("figcaption", "Seconds of a step", tag("span", " over steps", class_="unit"))
    return tag("figure", caption, frame(join_html(areas), text, steps, values))


def _look(part: str) -> str:
    return f"k-{part}" if part in _KNOWN else "k-other"
