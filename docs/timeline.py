"""The picture of one step in README.md, from the planner's simulation, drawn by the report's code.

python docs/generate.py        # writes timeline.svg, among others
"""

from __future__ import annotations

from megatrain.planning.estimate import estimate
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.style import STYLE
from megatrain.report.run import SpanRecord
from megatrain.report.timeline import ROW, WIDTH, lane_row, look, time_marks
from megatrain.step.ops import OpKind

MODEL, GPU, RAM, BATCH_TOKENS = "Qwen/Qwen3-8B", "4090", "192GB", "32k"
TITLES = {
    "in": "weights to device",
    "compute": "forward, backward",
    "out": "gradients to host",
    "host": "AdamW on the host",
}
LANES = tuple(TITLES)
"""The model is all in host memory, so the disk has nothing to do."""
LEFT, TOP, RIGHT, LANE = 216, 64, 24, 48
WIDE = 1000
HIGH = TOP + LANE * len(LANES) + 74


def picture() -> str:
    """Return the step as an SVG file."""
    found = estimate(MODEL, gpu=GPU, ram=RAM, batch_tokens=BATCH_TOKENS)
    simulation = found.plan.simulation
    spans = [
        SpanRecord(
            played.op.lane, played.op.kind.value, str(played.op), played.start_s, played.end_s
        )
        for played in simulation.ops
    ]
    step_s = simulation.step_s
    heading = (
        f"One training step of {MODEL} on an {found.machine}: {simulation.tokens:,} tokens "
        f"in {step_s:.1f} s (simulated)"
    )
    return join_html([
        tag(
            "svg",
            tag("title", heading),
            tag("style", Html(STYLE + ROWS)),
            tag("rect", class_="ground", width=str(WIDE), height=str(HIGH)),
            tag("text", heading, x="20", y="34", class_="heading"),
            *(_lane(lane, number, simulation.busy_shares[lane])
              for number, lane in enumerate(LANES)),
            _boxes(spans, step_s),
            *_times(step_s),
            *_legend({span.kind for span in spans}),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDE} {HIGH}",
        ),
        "\n",
    ])  # fmt: skip


ROWS = """
.ground{fill:var(--ground)}.lane{fill:var(--card)}
text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
.heading{font-size:17px;font-weight:600}.soft{fill:var(--soft);font-size:12px}
.middle{text-anchor:middle}
"""


def _lane(lane: str, number: int, busy: float) -> Html:
    top = TOP + LANE * number
    return join_html([
        tag("rect", class_="lane", x=str(LEFT), y=str(top), width=str(_width()),
            height=str(LANE - 3)),
        tag("text", lane, tag("tspan", f"  {TITLES[lane]}", class_="soft"), x="20", y=str(top + 20),
            style="white-space:pre"),
        tag("text", f"{busy:.0%} busy", x="20", y=str(top + 37), class_="soft"),
    ])  # fmt: skip


def _boxes(spans: list[SpanRecord], step_s: float) -> Html:
    """Return all spans, in the coordinates of the report."""
    return tag(
        "svg",
        *(lane_row(spans, lane, number, step_s) for number, lane in enumerate(LANES)),
        x=str(LEFT),
        y=str(TOP),
        width=str(_width()),
        height=str(LANE * len(LANES)),
        viewBox=f"0 0 {WIDTH} {ROW * len(LANES)}",
        preserveAspectRatio="none",
    )


def _times(step_s: float) -> list[Html]:
    top = TOP + LANE * len(LANES) + 16
    return [
        tag("text", label, x=f"{LEFT + place * _width():.0f}", y=str(top), class_="soft middle")
        for place, label in time_marks(step_s)
    ]


def _legend(found: set[str]) -> list[Html]:
    top = HIGH - 22
    parts = []
    kinds = [kind for kind in OpKind if kind in found]
    for number, kind in enumerate(kinds):
        left = 20 + number * (WIDE - 20) // len(kinds)
        parts.append(tag("rect", class_=look(kind), x=str(left), y=str(top - 11), width="16",
                         height="12"))  # fmt: skip
        parts.append(tag("text", kind, x=str(left + 22), y=str(top)))
    return parts


def _width() -> int:
    return WIDE - LEFT - RIGHT
