"""Charts of a report: lines over steps, and bars, in SVG without a script.

The drawing of a line chart fills its frame at any width (`preserveAspectRatio` none, strokes that
do not scale), so labels inside it would be squeezed. They are HTML, placed in percent of the frame,
and hidden from screen readers, which get the title: first and last values, and the extremes.

Invariants (tests/report/test_charts.py)
    1. Of any number of points at most five per bucket are drawn: its first, least, greatest and
       last value, and one gap where a value was not finite.
    2. An axis holds every finite value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median_low

from megatrain.report.markup import Html, join_html, tag
from megatrain.report.run import Point
from megatrain.text import count, figure, percent

WIDTH, HEIGHT = 1000, 400
"""The size of a drawing, in its own units."""
_NUM_BUCKETS = 1000
"""For all lines of a chart together."""
_NUM_COLORS = 7
FEW = 20
"""Fewer points are not smoothed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve of a chart."""

    label: str
    points: Sequence[Point]
    look: str
    """`faint`, `strong` or `dots`."""
    color: int
    """Which of the colors of the page."""

    @property
    def class_(self) -> str:
        return f"{self.look} c{self.color % _NUM_COLORS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values; `low` is below `high`, and above 0 where `log` is set."""

    low: float
    high: float
    log: bool = False
    """Equal distances are equal factors."""
    whole: bool = False
    """Only integers are labeled."""

    def place(self, value: float) -> float:
        """Return the position of `value`: 0 at `low`, 1 at `high`."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and labels of a few round values within the range."""
        return [(self.place(value), figure(value)) for value in self._round_values()]

    def _round_values(self) -> list[float]:
        if self.log:  # powers of ten; over a few of them also twice and five times each
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            stride = max(1, -(-(last - first + 1) // 6))
            factors = (1, 2, 5) if last - first <= 3 else (1,)
            values = [10.0**power * by for power in range(first, last, stride) for by in factors]
            return [value for value in values if self.low <= value <= self.high]
        rough = max((self.high - self.low) / 4, 1.0 if self.whole else 0.0)
        power = 10.0 ** math.floor(math.log10(rough))
        width = next(power * by for by in (1, 2, 5, 10) if power * by >= rough * 0.99)
        first = math.ceil(self.low / width - 1e-9)
        return [number * width for number in range(first, math.floor(self.high / width + 1e-9) + 1)]


def step_axis(first: int, last: int) -> Axis:
    return Axis(low=first, high=max(last, first + 1), whole=True)


def value_axis(values: Iterable[float]) -> Axis:
    """Return an axis that holds every finite value, with a margin.

    An axis whose greatest value is more than 30 times the middle one is logarithmic: one spike
    would press the curve flat.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    if low > 0 and high > 30 * median_low(known):
        return Axis(low=low / 1.2, high=high * 1.2, log=True)
    # A range too narrow for float64 to divide is widened until its labels differ.
    margin = max(0.05 * (high - low), 1e-4 * abs(high)) or 1.0
    return Axis(low=low - margin, high=high + margin)


def thinned(points: Sequence[Point], num_buckets: int) -> list[Point]:
    """Return of each bucket of steps the first, least, greatest and last point, and one gap."""
    if len(points) <= 5 * num_buckets:
        return list(points)
    first, width = points[0][0], (points[-1][0] - points[0][0] + 1) / num_buckets
    kept: list[Point] = []
    for _, bucket in groupby(points, key=lambda point: int((point[0] - first) / width)):
        held = list(bucket)
        chosen = {*[point for point in held if _is_gap(point[1])][:1]}
        if finite := [point for point in held if not _is_gap(point[1])]:
            by_value = sorted(finite, key=lambda point: point[1])
            chosen |= {finite[0], by_value[0], by_value[-1], finite[-1]}
        kept += sorted(chosen, key=lambda point: point[0])
    return kept


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the mean around each finite value, taken twice so that a spike becomes a small hill.

    A mean is over a hundredth of the curve. It looks both ways, and near the start no farther ahead
    than back: a falling curve is neither drawn late nor begun low. A few points stay as they are.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if len(points) < FEW:
        return finite
    values = [value for _, value in finite]
    half = max(2, len(values) // 200)
    for _ in range(2):
        sums, values = [0.0, *accumulate(values)], []
        for at in range(len(finite)):
            begin, end = max(0, at - half), min(at + min(half, at) + 1, len(finite))
            values.append((sums[end] - sums[begin]) / (end - begin))
    return [(step, value) for (step, _), value in zip(finite, values, strict=True)]


def share_axis(values: Iterable[float]) -> Axis:
    """Return an axis from 0 to 1, or farther where a value is outside."""
    known = [value for value in values if math.isfinite(value)]
    return Axis(low=min([0.0, *known]), high=max([1.0, *known]))


def line_chart(
    title: str, lines: Sequence[Series], unit: str = "", *, is_share: bool = False
) -> Html:
    """Return a figure of the lines that have points; nothing if none has.

    `is_share`: the values are shares of a whole.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return Html()
    steps = step_axis(
        min(line.points[0][0] for line in lines), max(line.points[-1][0] for line in lines)
    )
    axis = share_axis if is_share else value_axis
    values = axis(value for line in lines for _, value in line.points)
    lost = sorted({step for line in lines for step, value in line.points if _is_gap(value)})
    told = _told(title, lines, lost)
    svg = tag(
        "svg",
        tag("title", told),
        *(
            tag("path", class_="grid", d=f"M0 {_number(HEIGHT * (1 - place))}H{WIDTH}")
            for place, _ in values.ticks()
        ),
        *(_drawn(line, steps, values, _NUM_BUCKETS // len(lines)) for line in lines),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=told,
    )
    labels = [
        *(_label(text, "y", f"bottom:{place:.2%}") for place, text in values.ticks()),
        *(_label(text, "x end" if place > 0.96 else "x", f"left:{place:.2%}")
          for place, text in steps.ticks()),
    ]  # fmt: skip
    entries = [(line.class_, line.label) for line in lines if line.label]
    if lost:
        more = f" and {count(len(lost) - 1)} later" if len(lost) > 1 else ""
        entries.append(("lost", f"not finite: step {lost[0]:,}{more}"))
    return tag(
        "figure",
        tag("figcaption", title, tag("span", _unit(unit, values), class_="unit")),
        tag("div", svg, *labels, class_="frame"),
        legend(entries),
    )


def _label(text: str, class_: str, style: str) -> Html:
    return tag("span", text, class_=class_, style=style, aria_hidden="true")


def _drawn(line: Series, steps: Axis, values: Axis, num_buckets: int) -> Html:
    """Return a line with its gaps; a lone point, and each of `dots`, is a stroke of no length."""
    paths = []
    for is_gap, piece in groupby(thinned(line.points, num_buckets), lambda x: _is_gap(x[1])):
        if is_gap:
            continue
        places = [
            f"{_number(steps.place(step) * WIDTH)} {_number((1 - values.place(value)) * HEIGHT)}"
            for step, value in piece
        ]
        if line.look == "dots" or len(places) == 1:
            dots = "".join(f"M{place}h0" for place in places)
            paths.append(tag("path", class_=f"{line.class_} dot", d=dots))
        if len(places) > 1:
            paths.append(tag("path", class_=line.class_, d=f"M{'L'.join(places)}"))
    return join_html(paths)


def _told(title: str, lines: Sequence[Series], lost: Sequence[int]) -> str:
    """Return a chart in words, for who cannot see it."""
    text = []
    for line in lines:
        values = [value for _, value in line.points if not _is_gap(value)]
        if line.look != "faint" and values:
            ends = f"from {figure(values[0])} to {figure(values[-1])}"
            extremes = f"minimum {figure(min(values))}, maximum {figure(max(values))}"
            text.append(f"{line.label or 'values'} {ends}, {extremes}")
    gaps = [f"{count(len(lost))} steps not finite"] if lost else []
    return f"{title} by step: {'; '.join(text + gaps)}"


def _unit(unit: str, values: Axis) -> str:
    notes = [unit] if unit else []
    return " " + ", ".join([*notes, "logarithmic"] if values.log else notes)


def _is_gap(value: float) -> bool:
    return not math.isfinite(value)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Return a list of labels, each beside a swatch of the given classes."""
    items = (tag("li", tag("i", class_=f"swatch {look}"), label) for look, label in entries)
    return tag("ul", *items, class_="legend")


def share_bar(title: str, shares: Mapping[str, float]) -> Html:
    """Return shares of a whole as one bar; part `x` has the color of class `k-x`."""
    told = f"{title}: " + ", ".join(f"{part} {percent(share)}" for part, share in shares.items())
    starts = accumulate(shares.values(), initial=0.0)
    rects = (
        tag("rect", class_=f"k-{part}", x=f"{start:.2%}", width=f"{share:.2%}", height="100%")
        for start, (part, share) in zip(starts, shares.items(), strict=False)
    )
    bar = tag("svg", tag("title", told), *rects, class_="shares", role="img", aria_label=told)
    entries = ((f"k-{part}", f"{part} {percent(share)}") for part, share in shares.items())
    return join_html([bar, legend(entries)])


def bar_table(title: str, rows: Iterable[tuple[str, float, str, str]], note: str = "") -> Html:
    """Return rows of a name, a share of the widest bar, its text and its look."""
    return tag(
        "figure",
        tag("figcaption", title, tag("span", note, class_="unit")),
        tag("table", tag("tbody", *(_bar_row(*row) for row in rows))),
    )


def _bar_row(name: str, share: float, text: str, look: str) -> Html:
    bar = tag("svg", tag("rect", width=f"{share:.2%}", height="100%"), class_="bar",
              aria_hidden="true")  # fmt: skip
    return tag(
        "tr",
        tag("th", name, scope="row"),
        tag("td", bar, class_="bars"),
        tag("td", text, class_="number"),
        class_=look,
    )
