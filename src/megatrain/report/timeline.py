"""One step by lane: what each lane did and when, and when it waited.

Spans wide enough to point at have their own title. Narrower ones are drawn as one path for
each kind, and those that touch as one piece, so a step of many thousand ops stays a small picture.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.report.drawing.axis import Axis
from megatrain.report.drawing.chart import legend, x_label
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.run import Run, SpanRecord
from megatrain.step.ops import LANES, OpKind
from megatrain.text import duration, percent

WIDTH, ROW = 2000, 100
_WIDE = 1 / 200
"""Share of the step from which a span has a title."""
_NEAR = 1 / 2000
_KNOWN = (*OpKind, "wait")


def timeline_section(runs: Sequence[Run]) -> Html:
    """Return a timeline for each run that has a trace."""
    return join_html(
        draw_lanes(run.spans, run.name if len(runs) > 1 else "") for run in runs if run.spans
    )


def draw_lanes(spans: Sequence[SpanRecord], heading: str = "") -> Html:
    """Return the timeline of one step."""
    total_s = max(span.end_s for span in spans) or 1.0
    lanes = _lanes(spans)
    busy = {lane: _busy_s(spans, lane) / total_s for lane in lanes}
    rows = (lane_row(spans, lane, row, total_s) for row, lane in enumerate(lanes))
    text = f"One step of {duration(total_s)} by lane: " + ", ".join(
        f"{lane} busy {percent(share)}" for lane, share in busy.items()
    )
    svg = tag(
        "svg", tag("title", text), *rows, viewBox=f"0 0 {WIDTH} {ROW * len(lanes)}",
        preserveAspectRatio="none", role="img", aria_label=text,
    )  # fmt: skip
    names = (
        tag("span", lane, tag("small", f"{percent(share)} busy")) for lane, share in busy.items()
    )
    times = (x_label(place, label) for place, label in time_marks(total_s))
    return tag(
        "figure",
        *((tag("h3", heading),) if heading else ()),
        tag(
            "div",
            tag("div", *names, class_="lanes", aria_hidden="true"),
            tag("div", svg, tag("div", *times, class_="labels", aria_hidden="true"), class_="rows"),
            class_="timeline",
            style=f"--lanes:{len(lanes)}",
        ),
        _legend(spans),
    )


def _lanes(spans: Sequence[SpanRecord]) -> list[str]:
    """Return the lanes, those we know in the order data takes through them."""
    found = list(dict.fromkeys(span.lane for span in spans))
    return [lane for lane in LANES if lane in found] + [x for x in found if x not in LANES]


def _busy_s(spans: Sequence[SpanRecord], lane: str) -> float:
    return sum(s.end_s - s.start_s for s in spans if s.lane == lane and s.kind != "wait")


def lane_row(spans: Sequence[SpanRecord], lane: str, row: int, total_s: float) -> Html:
    drawn = []
    narrow: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        if span.lane != lane:
            continue
        start, end = span.start_s / total_s, span.end_s / total_s
        if end - start >= _WIDE:
            title = f"{span.name}: {duration(span.end_s - span.start_s)}"
            drawn.append(_piece(span.kind, row, [(start, end)], title))
        else:
            _add(narrow.setdefault(span.kind, []), start, end)
    drawn += [_piece(kind, row, places) for kind, places in narrow.items()]
    return join_html(drawn)


def _add(places: list[tuple[float, float]], start: float, end: float) -> None:
    """Add a place; one that nearly touches the last becomes part of it."""
    if places and start - places[-1][1] < _NEAR:
        places[-1] = (places[-1][0], max(places[-1][1], end))
    else:
        places.append((start, end))


def _piece(kind: str, row: int, places: list[tuple[float, float]], title: str = "") -> Html:
    """Return boxes in a row; a wait is a thin one, text from work by its shape."""
    top, height = row * ROW + (60 if kind == "wait" else 12), 16 if kind == "wait" else 76
    gap = 1.5 if title else 0.0  # between two of a kind
    boxes = "".join(
        f"M{start * WIDTH:.1f} {top}h{max((end - start) * WIDTH - gap, 0.1):.1f}v{height}"
        f"H{start * WIDTH:.1f}z"
        for start, end in places
    )
    if title:
        return tag("path", tag("title", title), class_=look(kind), d=boxes)
    return tag("path", class_=f"{look(kind)} narrow", d=boxes)


def time_marks(total_s: float) -> list[tuple[float, str]]:
    unit, name = (1.0, "s") if total_s >= 1 else (1e-3, "ms")
    ticks = Axis(low=0.0, high=total_s / unit).ticks()
    return [(place, f"{label} {name}") for place, label in ticks]


def _legend(spans: Sequence[SpanRecord]) -> Html:
    found = {span.kind for span in spans}
    known = [(look(kind), kind) for kind in _KNOWN if kind in found]
    others = [("k-other", "other")] if found - set(_KNOWN) else []
    return legend(known + others)


def look(kind: str) -> str:
    return f"k-{kind}" if kind in _KNOWN else "k-other"
