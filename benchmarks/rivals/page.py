"""Tables and picture of a comparison, from the figures of `python -m benchmarks.rivals --json`.

python -m benchmarks.rivals.page FIGURES.json PICTURE.png      prints the tables as Markdown
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rivals.compared import Figures, code_lines

OURS_COLOR, RIVAL_COLOR = "#1f6fb2", "#b8bec6"


def tables(figures: Figures) -> Iterator[str]:
    """Yield the lines of all tables in Markdown, as far as there are figures."""
    yield from _step_table(figures.get("speed", []))
    yield ""
    yield from _bytes_table(figures.get("bytes", []))
    yield ""
    yield from _largest_table(figures.get("largest", []))


def _step_table(rows: list[Figures]) -> Iterator[str]:
    yield "| | seconds of a step, MegaTrain = 1 | first step, s | lines | worker, settings |"
    yield "|---|---|---|---|---|"
    for row in rows:
        lines = code_lines(Path(row["worker"]).stem)
        shown = "did not run | "
        if "over" in row:
            low, high = _slower(row)
            ratio = f"{1 / row['over']:.2f} ({low:.2f} to {high:.2f})"
            shown = f"{ratio} | {row['rival_first_step_s']:.0f}"
        yield f"| {row['label']} | {shown} | {lines} | {_settings(row)} |"


def _slower(row: Figures) -> tuple[float, float]:
    """Return the interval of the rival's seconds over ours."""
    low, high = row["over_interval"]
    return 1 / high, 1 / low


def _bytes_table(rows: list[Figures]) -> Iterator[str]:
    yield "| fp32 masters in all | bytes per parameter | moments | worker, settings |"
    yield "|---|---|---|---|"
    for row in sorted(rows, key=lambda row: float(row.get("bytes_per_param", 99.0))):
        held = f"{row['bytes_per_param']:.1f}" if "bytes_per_param" in row else "did not run"
        yield f"| {row['label']} | {held} | {row['states']} | {_settings(row)} |"


def _largest_table(rows: list[Figures]) -> Iterator[str]:
    limits = sorted({row["limit_gib"] for row in rows if "limit_gib" in row})
    heads = "".join(f" {limit:g} GiB |" for limit in limits)
    yield f"| largest model under |{heads} moments | worker, settings |"
    yield "|---|" + "---|" * (len(limits) + 2)
    for label, found in _by_label(rows).items():
        cells = "".join(f" {_millions(found.get(limit))} |" for limit in limits)
        row = next(iter(found.values()))
        yield f"| {label} |{cells} {row['states']} | {_settings(row)} |"


def _by_label(rows: list[Figures]) -> dict[str, dict[float, Figures]]:
    """Return the rows of each contestant by limit; of one that did not run, its only row."""
    found: dict[str, dict[float, Figures]] = {}
    for row in rows:
        found.setdefault(row["label"], {})[row.get("limit_gib", 0.0)] = row
    return found


def _millions(row: Figures | None) -> str:
    if row is None:
        return ""
    return f"{row['params'] / 1e6:.0f}M" if row.get("params") else "none"


def draw(figures: Figures, path: Path) -> None:
    """Draw step time, bytes and largest models, ours beside every rival that ran."""
    from matplotlib import pyplot

    speed = [row for row in figures.get("speed", []) if "over" in row]
    held = [row for row in figures.get("bytes", []) if "bytes_per_param" in row]
    held.sort(key=lambda row: float(row["bytes_per_param"]))
    panels, axes = pyplot.subplots(1, 3, figsize=(18, 4.6), layout="constrained")
    speed.sort(key=lambda row: -float(row["over"]))
    steps = [(1 / row["over"], row["label"], row["is_ours"]) for row in speed]
    _bars(axes[0], steps, "{:.2f}", [_slower(row) for row in speed])
    axes[0].axvline(1, color=OURS_COLOR, linewidth=1)
    axes[0].set_title("Seconds of a step, MegaTrain with the same = 1")
    _bars(axes[1], [(r["bytes_per_param"], r["label"], r["is_ours"]) for r in held], "{:.1f}")
    axes[1].set_title("Peak resident bytes per parameter, fp32 masters")
    fits = [row for row in figures.get("largest", []) if row.get("params")]
    limit = min((row["limit_gib"] for row in fits), default=0.0)  # a card has no such part
    fits = [row for row in fits if row["limit_gib"] == limit]
    fits.sort(key=lambda row: -int(row["params"]))
    _bars(axes[2], [(r["params"] / 1e6, r["label"], r["is_ours"]) for r in fits], "{:.0f}M")
    axes[2].set_title(f"Largest model under {limit:g} GiB")
    axes[2].set_visible(bool(fits))
    panels.savefig(path, dpi=110)


def _bars(
    axes: Any,
    bars: list[tuple[float, str, bool]],
    form: str,
    intervals: list[tuple[float, float]] | None = None,
) -> None:
    values = [value for value, _, _ in bars]
    colors = [OURS_COLOR if ours else RIVAL_COLOR for _, _, ours in bars]
    ends = None
    if intervals:
        pairs = list(zip(values, intervals, strict=True))
        ends = [[max(value - low, 0) for value, (low, _) in pairs]]
        ends += [[max(high - value, 0) for value, (_, high) in pairs]]
    drawn = axes.barh(range(len(bars)), values, color=colors, xerr=ends, ecolor="#444", capsize=2)
    axes.set_yticks(range(len(bars)), [label for _, label, _ in bars])
    axes.bar_label(drawn, [form.format(value) for value in values], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max([*values, *(high for _, high in intervals or [])], default=1.0))
    axes.spines[["top", "right"]].set_visible(False)


def _settings(row: Figures) -> str:
    shown = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
    parts = [Path(row["worker"]).name, str(row["dtype"]), *([shown] if shown else [])]
    return "; ".join(parts)


def main() -> None:
    source, picture = map(Path, sys.argv[1:])
    figures = json.loads(source.read_text())
    print("\n".join(tables(figures)))
    draw(figures, picture)


if __name__ == "__main__":
    main()
