"""Table and picture of a comparison, from the figures of `python -m benchmarks.rivals --json`.

python -m benchmarks.rivals.page FIGURES.json PICTURE.png      prints the table as Markdown
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rivals.compared import Figures, code_lines

OURS_COLOUR, RIVAL_COLOUR = "#1f6fb2", "#b8bec6"


def table(figures: Figures) -> Iterator[str]:
    """Yield the rows of a Markdown table: step time first, then bytes."""
    yield "| | step, ours over it (processor time) | first step | lines | settings |"
    yield "|---|---|---|---|---|"
    for row in figures.get("speed", []) + figures.get("variants", []):
        name = Path(row["worker"]).stem
        if "over" not in row:
            yield f"| {row['label']} | did not run | | {code_lines(name)} | |"
            continue
        over = f"{row['over']:.2f} ({row['processor_over']:.2f})"
        first = f"{row['rival_first_step_s']:.0f} s, ours {row['ours_first_step_s']:.0f} s"
        yield f"| {row['label']} | {over} | {first} | {code_lines(name)} | {_settings(row)} |"
    yield ""
    yield "| fp32 masters in all | bytes per parameter | moments | settings |"
    yield "|---|---|---|---|"
    for row in sorted(figures.get("bytes", []), key=lambda row: row.get("bytes_per_param", 99.0)):
        held = f"{row['bytes_per_param']:.1f}" if "bytes_per_param" in row else "did not run"
        yield f"| {row['label']} | {held} | {row['states']} | {_settings(row)} |"


def draw(figures: Figures, path: Path) -> None:
    """Draw step time and bytes per parameter, ours beside every rival that ran."""
    from matplotlib import pyplot

    speed = [row for row in figures.get("speed", []) if "over" in row]
    held = [row for row in figures.get("bytes", []) if "bytes_per_param" in row]
    held.sort(key=lambda row: float(row["bytes_per_param"]))
    panels, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = sorted((1 / row["processor_over"], row["label"], False) for row in speed)
    _bars(left, sorted([(1.0, "MegaTrain", True), *steps]), "{:.2f}")
    left.set_title("Processor time of a step, MegaTrain = 1")
    _bars(right, [(r["bytes_per_param"], r["label"], r["is_ours"]) for r in held], "{:.1f}")
    right.set_title("Peak resident bytes per parameter, fp32 masters")
    panels.savefig(path, dpi=110)


def _bars(axes: Any, bars: list[tuple[float, str, bool]], form: str) -> None:
    values = [value for value, _, _ in bars]
    colours = [OURS_COLOUR if ours else RIVAL_COLOUR for _, _, ours in bars]
    drawn = axes.barh([label for _, label, _ in bars], values, color=colours)
    axes.bar_label(drawn, [form.format(value) for value in values], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(values))
    axes.spines[["top", "right"]].set_visible(False)


def _settings(row: Figures) -> str:
    shown = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
    return f"{row['dtype']}; {shown}" if shown else str(row["dtype"])


def main() -> None:
    source, picture = map(Path, sys.argv[1:])
    figures = json.loads(source.read_text())
    print("\n".join(table(figures)))
    draw(figures, picture)


if __name__ == "__main__":
    main()
