"""The curves of proofs/peers/loss.py as a picture, drawn by the report's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.report.drawing.axis import step_axis, value_axis
from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.style import STYLE

WIDE, HIGH, LEFT, TOP, RIGHT, BOTTOM = 1000, 420, 70, 70, 24, 60
NAMES = {"synchronous": "synchronous steps", "rounds": "rounds, fp32", "sparse": "rounds, sparse"}


def picture(found: Mapping[str, Any]) -> str:
    """Return the held-out losses over steps as an SVG file."""
    curves = {name: found[name]["curve"] for name in NAMES}
    steps = step_axis(step for curve in curves.values() for step, _ in curve)
    values = value_axis(loss for curve in curves.values() for _, loss in curve)
    across, up = WIDE - LEFT - RIGHT, HIGH - TOP - BOTTOM

    def at(step: float, loss: float) -> str:
        return f"{LEFT + across * steps.place(step):.1f} {TOP + up * (1 - values.place(loss)):.1f}"

    heading = (
        f"Held-out loss of {found['peers']} peers in rounds of {found['inner_steps']} steps, "
        f"{found['tokens']:,} tokens"
    )
    drawn: list[Html] = []
    for place, label in values.ticks():
        y = f"{TOP + up * (1 - place):.1f}"
        drawn.append(tag("path", class_="grid", d=f"M{LEFT} {y}H{WIDE - RIGHT}"))
        drawn.append(tag("text", label, x=str(LEFT - 10), y=y, text_anchor="end", class_="soft"))
    for place, label in steps.ticks():
        x = f"{LEFT + across * place:.1f}"
        drawn.append(tag("text", label, x=x, y=str(HIGH - 36), text_anchor="middle", class_="soft"))
    for number, (name, curve) in enumerate(curves.items()):
        line = "M" + "L".join(at(step, loss) for step, loss in curve)
        drawn.append(tag("path", class_=f"strong c{number}", d=line))
        begin = LEFT + 300 * number
        drawn.append(tag("path", class_=f"strong c{number}", d=f"M{begin} {HIGH - 14}h24"))
        text = f"{NAMES[name]}: {curve[-1][1]:.4f}"
        drawn.append(tag("text", text, x=str(begin + 32), y=str(HIGH - 9), class_="ink"))
    return join_html([
        tag(
            "svg",
            tag("title", heading),
            tag("style", Html(STYLE + _OWN)),
            tag("rect", class_="ground", width=str(WIDE), height=str(HIGH)),
            tag("text", heading, x="20", y="34", class_="heading"),
            *drawn,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDE} {HIGH}",
        ),
        "\n",
    ])  # fmt: skip


_OWN = """
.ground{fill:var(--ground)}.heading{font:600 18px system-ui,sans-serif;fill:var(--ink)}
.soft{font:14px system-ui,sans-serif;fill:var(--soft)}
.ink{font:14px system-ui,sans-serif;fill:var(--ink)}
.strong{fill:none;stroke-width:2.5}.grid{stroke:var(--edge);fill:none}
.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}
"""
