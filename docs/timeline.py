"""The picture of one step in README.md, from the planner's simulation.

python docs/generate.py        # writes timeline.svg, among others
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.planning.estimate import estimate
from megatrain.planning.prediction import predicted_time
from megatrain.planning.simulate import SimulatedOp
from megatrain.report.markup import Html, join_html, tag
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
COLORS = {
    OpKind.FETCH: "#00875f",
    OpKind.FORWARD: "#0072b2",
    OpKind.HEAD: "#e0cf20",
    OpKind.BACKWARD: "#d55e00",
    OpKind.DRAIN: "#e69f00",
    OpKind.NORM: "#56b4e9",
    OpKind.CLIP: "#8c959f",
    OpKind.UPDATE: "#b0508a",
}
STYLE = """
:root{--ground:#fff;--ink:#1c2127;--soft:#59636e;--card:#f5f7f9}
@media(prefers-color-scheme:dark){:root{
--ground:#14171b;--ink:#e4e8ec;--soft:#9ba5b0;--card:#1d2227}}
.ground{fill:var(--ground)}.lane{fill:var(--card)}
text{font:14px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
.heading{font-size:17px;font-weight:600}.soft{fill:var(--soft);font-size:12px}
.middle{text-anchor:middle}
"""
LEFT, TOP, RIGHT, LANE = 216, 64, 24, 48
WIDE = 1000
HIGH = TOP + LANE * len(LANES) + 74
WIDTH = WIDE - LEFT - RIGHT
"""Of the step itself."""


def picture() -> str:
    """Return the step as an SVG file."""
    found = estimate(MODEL, gpu=GPU, ram=RAM, batch_tokens=BATCH_TOKENS)
    simulation = found.plan.simulation
    step_s = simulation.step_s
    heading = (
        f"One training step of {MODEL} on an {found.machine}: {simulation.tokens:,} tokens "
        f"in {predicted_time(step_s)}, predicted"
    )
    lanes = [
        _lane(lane, TOP + LANE * number, simulation.busy_shares[lane])
        for number, lane in enumerate(LANES)
    ]
    return join_html([
        tag(
            "svg",
            tag("title", heading),
            tag("style", Html(STYLE)),
            tag("rect", class_="ground", width=str(WIDE), height=str(HIGH)),
            tag("text", heading, x="20", y="34", class_="heading"),
            *lanes,
            *(_boxes(kind, simulation.ops, step_s) for kind in COLORS),
            *_progress(),
            *_legend(),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDE} {HIGH}",
        ),
        "\n",
    ])  # fmt: skip


def _lane(lane: str, top: int, busy: float) -> Html:
    return join_html([
        tag("rect", class_="lane", x=str(LEFT), y=str(top), width=str(WIDTH), height=str(LANE - 3)),
        tag("text", lane, tag("tspan", f"  {TITLES[lane]}", class_="soft"), x="20", y=str(top + 20),
            style="white-space:pre"),
        tag("text", f"{busy:.0%} busy", x="20", y=str(top + 37), class_="soft"),
    ])  # fmt: skip


def _boxes(kind: OpKind, ops: Sequence[SimulatedOp], step_s: float) -> Html:
    """Return all ops of a kind as one path."""
    boxes = ""
    for played in ops:
        if played.op.kind is kind:
            left = LEFT + played.start_s / step_s * WIDTH
            width = max((played.end_s - played.start_s) / step_s * WIDTH, 0.5)
            width -= 0.6 if width > 3 else 0.0  # a gap between two of a kind
            top = TOP + LANE * LANES.index(played.op.lane) + 6
            boxes += f"M{left:.1f} {top}h{width:.1f}v{LANE - 15}h-{width:.1f}z"
    return tag("path", d=boxes, fill=COLORS[kind])


def _progress() -> list[Html]:
    """Return the axis in percent of the step: its seconds are predicted, and known as a range."""
    top = TOP + LANE * len(LANES) + 16
    return [
        tag(
            "text", f"{percent}%", x=f"{LEFT + percent / 100 * WIDTH:.0f}", y=str(top),
            class_="soft middle",
        )
        for percent in range(0, 101, 20)
    ]  # fmt: skip


def _legend() -> list[Html]:
    top = HIGH - 22
    parts = []
    for number, (kind, color) in enumerate(COLORS.items()):
        left = 20 + number * (WIDE - 20) // len(COLORS)
        parts.append(tag("rect", x=str(left), y=str(top - 11), width="16", height="12", fill=color))
        parts.append(tag("text", kind, x=str(left + 22), y=str(top)))
    return parts
