"""Predicted speed against tokens per step, from `megatrain estimate --json`, as a picture.

    python docs/plot_estimate.py PICTURE MODEL [options of megatrain estimate]

Dashed lines are the speeds that one resource alone would allow. Where the curve leaves a line,
another resource limits. It needs matplotlib.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from megatrain.planning.prediction import speed_range

STEP_TOKENS = tuple(1 << power for power in range(11, 21))
LANES = {
    "compute": ("compute", "#d55e00"),
    "in": ("link to the device", "#0072b2"),
    "out": ("link to the host", "#3a9bd9"),
    "host": ("optimizer", "#00875f"),
    "comm": ("network", "#8a4fbf"),
    "disk": ("disk", "#a87400"),
}


def estimated(arguments: list[str], step_tokens: int) -> dict[str, Any]:
    """Return the plan for one size of step, which may not fit."""
    command = [sys.executable, "-m", "megatrain", "estimate", *arguments]
    command += ["--batch-tokens", str(step_tokens), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)
    return found


def draw(plans: list[dict[str, Any]], path: str) -> None:
    """Write the picture of the plans that fit, of growing sizes of step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    plans = [plan for plan in plans if plan["fits"]]
    if not plans:
        raise SystemExit("the model does not fit, whatever the size of a step")
    tokens = [plan["step_tokens"] for plan in plans]
    speeds = [plan["predicted"]["tokens_per_s"] for plan in plans]
    for lane, (name, color) in LANES.items():
        busy = [plan["predicted"]["busy"].get(lane, 0) for plan in plans]
        if all(busy):
            allowed = [speed / share for speed, share in zip(speeds, busy, strict=True)]
            axes.plot(tokens, allowed, "--", color=color, label=f"{name} alone")
    low, high = zip(*map(speed_range, speeds), strict=True)
    axes.fill_between(tokens, low, high, color="#222222", alpha=0.15)
    axes.plot(tokens, speeds, color="#222222", linewidth=2.5, label="predicted, with its range")
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="tok/s, predicted")
    axes.set(title=f"{plans[0]['model']} on {plans[0]['machine']}")
    least, most = min(speeds) / 1.5, 2.5 * max(speeds)
    round_speeds = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]
    ticks = [speed for speed in round_speeds if least <= speed <= most]
    axes.set_yticks(ticks, [f"{speed:,}" for speed in ticks])
    axes.set_ylim(least, most)
    axes.set_xticks(tokens[::2], [f"{count >> 10}k" for count in tokens[::2]])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


if __name__ == "__main__":
    picture, *rest = sys.argv[1:]
    draw([estimated(rest, step_tokens) for step_tokens in STEP_TOKENS], picture)
