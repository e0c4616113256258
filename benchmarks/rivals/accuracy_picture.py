"""The picture of benchmarks/rivals/accuracy.py: losses, their distance to plain fp32, and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.rivals.curves import REFERENCE, Curves, gaps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 25
"""Steps over which curves are averaged."""
NAMES = {
    "plain_fp32": "plain PyTorch, fp32",
    "plain_bf16": "plain PyTorch, bf16 without masters",
    "deepspeed": "DeepSpeed ZeRO-3, bf16",
    "ours_fp32": "MegaTrain, fp32",
    "ours_bf16": "MegaTrain, bf16",
    "ours_8bit": "MegaTrain, bf16, 8-bit states",
    "ours_fp8": "MegaTrain, fp8 products",
    "other_order": "plain PyTorch, fp32, other order",
}
LOOKS: dict[str, dict[str, Any]] = {
    "plain_fp32": {"color": "0.75", "linewidth": 6},
    "plain_bf16": {"color": "#D55E00", "linewidth": 2},
    "deepspeed": {"color": "#009E73", "linewidth": 2},
    "ours_fp32": {"color": "black", "linewidth": 1, "linestyle": "-"},
    "ours_bf16": {"color": "#0072B2", "linewidth": 2, "linestyle": "--"},
    "ours_8bit": {"color": "#CC79A7", "linewidth": 2, "linestyle": ":"},
    "ours_fp8": {"color": "#E69F00", "linewidth": 2},
    "other_order": {"color": "0.4"},
}


def draw(curves: Curves, figures: Mapping[str, Any], path: Path) -> None:
    """Write the three panels as one picture."""
    from matplotlib.figure import Figure

    num_steps = int(figures["steps"])
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    panels: dict[str, Axes] = figure.subplot_mosaic(
        [["loss", "gap"], ["end", "end"]], height_ratios=[3, 2]
    )
    loss, gap = panels["loss"], panels["gap"]
    for name, look in LOOKS.items():
        if name in curves and name != "other_order":
            _curve(loss, curves[name][:num_steps], label=NAMES[name], **look)
        if name in curves and name not in ("other_order", REFERENCE):
            _curve(gap, [abs(each) for each in gaps(curves, name, num_steps)], **look)
    loss.set(title=f"Training loss, mean of {WINDOW} steps", xlabel="step")
    gap.set(title="Its distance to plain fp32, the same mean", xlabel="step", yscale="log")
    bottom, top = loss.get_ylim()
    loss.set_ylim(bottom, top + 0.45 * (top - bottom))  # room for the names
    loss.legend(fontsize=9)
    _held_out(panels["end"], figures, [name for name in LOOKS if name in curves])
    for axes in panels.values():
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _curve(axes: Axes, values: Sequence[float], **look: Any) -> None:
    """Draw the moving mean at the middle of its window."""
    window = min(WINDOW, len(values))
    means = np.convolve(values, np.ones(window) / window, mode="valid")
    axes.plot(np.arange(len(means)) + (window + 1) / 2, means, **look)


def _held_out(axes: Axes, figures: Mapping[str, Any], names: Sequence[str]) -> None:
    """Draw by how much each held-out loss has fallen, as a bar with its figure."""
    start = figures["start_fp32_loss"]
    for place, name in enumerate(reversed(names)):
        end = figures[f"{name}_held_out_loss"]
        axes.barh(place, start - end, color=LOOKS[name]["color"], height=0.7)
        share = figures[f"{name}_gain_share"]
        axes.text(start - end, place, f" {end:.4f}  ({share:.1%})", va="center", fontsize=9)
    axes.set_yticks(range(len(names)), [NAMES[name] for name in reversed(names)], fontsize=9)
    axes.margins(x=0.2)
    axes.set(
        title="Held-out loss at the end (and its fall, relative to that of plain fp32)",
        xlabel=f"below the start, {start:.4f}",
    )
