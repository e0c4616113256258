"""Curves over steps: an SVG that stretches, and labels of fixed size beside it.

The drawing fills its frame at any width (`preserveAspectRatio` none, strokes that do not scale), so
labels inside it would be squeezed. They are HTML, placed in percent of the frame, and hidden from
screen readers, which get the title: the curve, its first and last values, and the extremes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain.report.drawing.axis import Axis, step_axis, value_axis
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.thinning import Point, pieces, thinned
from megatrain.text import count, figure

WIDTH, HEIGHT = 1000, 400
"""The size of the drawing, in its own units."""
_BUCKETS = 1000
"""Over all lines of a chart, not under a tenth of them for one line."""
_MOST_MARKS = 40
_COLORS = 7
"""Colors of the page; lines beyond have them again, dashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve of a chart."""

    label: str
    points: Sequence[Point]
    look: str
    """`faint`, `strong` or `dots`."""
    color: int
    """Which of the colors of the page."""


def line_chart(title: str, lines: Sequence[Series], unit: str = "") -> Html:
    """Return a figure of the lines that have points; nothing if none has."""
    lines = [line for line in lines if line.points]
    if not lines:
        return Html()
    steps = step_axis(step for line in lines for step in (line.points[0][0], line.points[-1][0]))
    values = value_axis(value for line in lines for _, value in line.points)
    buckets = max(_BUCKETS // len(lines), _BUCKETS // 10)
    drawn = [_drawn(line, steps, values, buckets) for line in lines]
    lost = sorted({step for line in lines for step, value in line.points if not _finite(value)})
    heading = join_html([title, tag("span", _unit(unit, values), class_="unit")])
    return tag(
        "figure",
        tag("figcaption", heading),
        frame(join_html(drawn), _told(title, lines, lost), steps, values, _marks(lost, steps)),
        _legend(lines, lost),
    )


def frame(drawing: Html, text: str, steps: Axis, values: Axis, over: Html | None = None) -> Html:
    """Return the drawing with grid and labels; `text` is the text for a screen reader."""
    grid = join_html(
        tag("path", class_="grid", d=f"M0 {_number(HEIGHT * (1 - place))}H{WIDTH}")
        for place, _ in values.ticks()
    )
    svg = tag(
        "svg",
        tag("title", text),
        grid,
        drawing,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=text,
    )
    ups = (tag("span", label, class_="y", style=f"bottom:{place:.2%}")
           for place, label in values.ticks())  # fmt: skip
    rights = (x_label(place, label) for place, label in steps.ticks())
    labels = tag("div", *ups, *rights, class_="labels", aria_hidden="true")
    return tag("div", svg, labels, over or Html(), class_="frame")


def x_label(place: float, text: str) -> Html:
    """Return a label below the frame; one at its very end stays within the page."""
    return tag("span", text, class_="x end" if place > 0.96 else "x", style=f"left:{place:.2%}")


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Return a list of labels, each beside a swatch of the given classes."""
    return tag(
        "ul",
        *(tag("li", tag("i", class_=f"swatch {look}"), label) for look, label in entries),
        class_="legend",
    )


def path(points: Iterable[tuple[float, float]]) -> str:
    """Return a line through places in the unit square, 0,0 at the lower left."""
    return "M" + "L".join(
        f"{_number(right * WIDTH)} {_number((1 - up) * HEIGHT)}" for right, up in points
    )


def _drawn(line: Series, steps: Axis, values: Axis, num_buckets: int) -> Html:
    """Return a line; a lone point between gaps, and each of `dots`, is a stroke of no length."""
    paths = []
    for piece in pieces(thinned(line.points, num_buckets)):
        places = [(steps.place(step), values.place(value)) for step, value in piece]
        if line.look == "dots" or len(places) == 1:
            dots = "".join(f"{path([place])}h0" for place in places)
            paths.append(tag("path", class_=f"dot {_color(line)}", d=dots))
        if len(places) > 1:
            paths.append(tag("path", class_=f"{line.look} {_color(line)}", d=path(places)))
    return join_html(paths)


def _marks(lost: Sequence[int], steps: Axis) -> Html:
    """Return a mark at the top for values that could not be drawn, none on top of another."""
    shown = {round(steps.place(step) * _MOST_MARKS): step for step in reversed(lost)}
    return join_html(
        tag("span", "\u2715", class_="lost", style=f"left:{steps.place(step):.2%}",
            title=f"not finite at step {step:,}", aria_hidden="true")
        for step in shown.values()
    )  # fmt: skip


def _legend(lines: Sequence[Series], lost: Sequence[int]) -> Html:
    entries = [(f"{line.look} {_color(line)}", line.label) for line in lines if line.label]
    if lost:
        some = ", ".join(f"{step:,}" for step in lost[:3]) + (", ..." if len(lost) > 3 else "")
        steps = "step" if len(lost) == 1 else f"{count(len(lost))} steps:"
        entries.append(("none", f"\u2715 not finite: {steps} {some}"))
    return legend(entries)


def _told(title: str, lines: Sequence[Series], lost: Sequence[int]) -> str:
    text = []
    for line in lines:
        values = [value for _, value in line.points if _finite(value)]
        if line.look != "faint" and values:
            ends = f"from {figure(values[0])} to {figure(values[-1])}"
            extremes = f"minimum {figure(min(values))}, maximum {figure(max(values))}"
            text.append(f"{line.label or 'values'} {ends}, {extremes}")
    gaps = [f"{count(len(lost))} steps not finite"] if lost else []
    return f"{title} by step: {'; '.join(text + gaps)}"


def _unit(unit: str, values: Axis) -> str:
    notes = [unit] if unit else []
    return " " + ", ".join([*notes, "logarithmic"] if values.log else notes)


def _color(line: Series) -> str:
    number = line.color % _COLORS
    return f"c{number}" if number == line.color else f"c{number} again"


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
