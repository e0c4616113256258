"""The loss as a picture for places that show no HTML, where matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from megatrain.report.drawing.markup import visible
from megatrain.report.drawing.thinning import Point, pieces, smoothed, thinned
from megatrain.report.run import Run

_COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0508a", "#a87400", "#3a9bd9", "#5a5a5a")
_BUCKETS = 500


def draw_loss(runs: Sequence[Run]) -> bytes | None:
    """Return a PNG of the loss; None without matplotlib, or without a loss to draw."""
    if not any(list(pieces(run.curve("loss"))) for run in runs):
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    for number, run in enumerate(runs):
        _draw(axes, run, _COLOURS[number % len(_COLOURS)], _label(run.name))
    axes.legend(frameon=False)
    written = io.BytesIO()
    figure.savefig(written, format="png", metadata={"Software": "MegaTrain"})
    return written.getvalue()


def _draw(axes: Any, run: Run, colour: str, label: str) -> None:
    losses = run.curve("loss")
    for piece in pieces(thinned(losses, _BUCKETS)):
        axes.plot(*_columns(piece), color=colour, linewidth=0.8, alpha=0.35)
    smooth = thinned(smoothed(losses), _BUCKETS)
    axes.plot(*_columns(smooth), color=colour, linewidth=2, label=label)
    evals = [point for piece in pieces(run.curve("eval_loss")) for point in piece]
    if evals:
        axes.plot(
            *_columns(evals), "o", color=colour, markeredgecolor="white", label=f"{label}, eval"
        )


def _columns(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _label(name: str) -> str:
    """Return a name matplotlib draws as it is: in its font, no formula, not taken for hidden."""
    plain = visible(name).encode("ascii", "backslashreplace").decode()
    return (" " + plain if plain.startswith("_") else plain).replace("$", r"\$")
