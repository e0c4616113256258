"""A run in a terminal: figures, curves, lanes and events, in the columns and rows that there are.

    Run --frame(run, columns, rows, now)--> lines of text with colors

A curve is drawn in dots of Braille, two by four in a character; a lane as bars, as high as it was
busy. Text of a run folder is untrusted: no character of it steers the terminal.

Laws (tests/report/test_terminal.py)
    1. No line is wider than the columns, at any width from 20; no frame is higher than the rows,
       if there are ten or more.
    2. The greatest and the least value of a curve are in its first and last row.
    3. No content of a run folder raises, or reaches the terminal unescaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from megatrain.report.drawing.thinning import Point, averaged
from megatrain.report.run import Run, number
from megatrain.report.time_split import split_shares
from megatrain.text import count, duration, figure, percent, printable

SILENT_S = 30.0
"""A sign of life that is older is said to be missing."""
_WIDE = 90
"""Columns from which two curves stand side by side."""
_LEAST_ROWS, _MOST_ROWS = 3, 12
_CURVES = {
    "loss": "loss", "tokens_per_s": "tokens/s", "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
}  # fmt: skip
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character: its two columns, from above."""
_BARS = " " + "".join(chr(0x2581 + height) for height in range(8)) + chr(0x2588)
"""Ten heights."""
_DONE, _TO_DO, _MORE = chr(0x2501), chr(0x2504), chr(0x2026)
_STATES = {"training": "green", "ended": "green", "interrupted": "yellow", "failed": "red"}


def frame(run: Run, columns: int, rows: int, now: float) -> list[Text]:
    """Return the lines of a picture of a run; `now` is the time of day, as in its heartbeat."""
    head = [_title(run, now), _progress(run, columns), _figures(run)]
    tail = [*_lanes(run, columns), *_events(run)]
    room = rows - len(head)
    tail = tail[: max(0, room - _LEAST_ROWS - 1)]
    lines = [*head, *_curves(run, columns, room - len(tail)), *tail]
    return [_cut(line, columns) for line in lines[:rows]]


def is_over(run: Run) -> bool:
    """Return whether the run has ended as it should."""
    return run.beat.get("state") == "ended"


def _cut(line: Text, columns: int) -> Text:
    """Return a line that is no wider than the columns, with a mark where it was cut."""
    if line.cell_len > columns:
        while line.cell_len > columns - 1:
            line.right_crop()
        line.append(_MORE)
    return line


def _title(run: Run, now: float) -> Text:
    state, beaten = str(run.beat.get("state", "")), number(run.beat.get("time"))
    title = Text(printable(run.name).replace("\n", " "), style="bold")
    if state == "training" and beaten is not None and now - beaten > SILENT_S:
        return title.append(f"  no sign of life for {duration(now - beaten)}", style="red")
    if state in _STATES:
        title.append(f"  {state}", style=_STATES[state])
    finished = number(run.beat.get("step_time"))
    if state == "training" and finished is not None and now > finished:
        title.append(f"  last step {duration(now - finished)} ago", style="dim")
    return title


def _progress(run: Run, columns: int) -> Text:
    step = run.steps[-1].step if run.steps else 0
    total = number(run.beat.get("num_steps"))
    if total is None or not 0 < total < math.inf:
        return Text(f"step {count(step)}")
    share = min(1.0, step / total)
    text = f"step {count(step)}/{count(total)}  {share:.0%}"
    times = [line.values["seconds"] for line in run.steps[-20:] if "seconds" in line.values]
    times = [seconds for seconds in times if math.isfinite(seconds)]
    if times and step < total and run.beat.get("state", "training") == "training":
        text += f"  {duration(math.fsum(times) / len(times) * (total - step))} left"
    width = min(40, columns - len(text) - 2)
    bar = Text(text)
    if width >= 5:
        done = round(width * share)
        bar.append("  " + _DONE * done, style="green").append(_TO_DO * (width - done), style="dim")
    return bar


def _figures(run: Run) -> Text:
    """Return the figures of the last step and evaluation, those that people look for first."""
    last = run.steps[-1].values if run.steps else {}
    parts = [
        f"{word} {figure(last[name])}"
        for name, word in (("loss", "loss"), ("grad_norm", "norm"), ("learning_rate", "lr"))
        if name in last
    ]
    if evals := run.curve("eval_loss"):
        parts.insert(1, f"eval {figure(evals[-1][1])}")
    if "seconds" in last:
        parts.append(f"{duration(last['seconds'])} a step")
    if "tokens_per_s" in last:
        parts.append(f"{figure(last['tokens_per_s'])} tok/s")
    if "of_bound" in last:
        parts.append(f"{percent(last['of_bound'])} of bound")
    return Text("  ".join(parts) or "no step yet")


def _curves(run: Run, columns: int, rows: int) -> list[Text]:
    """Return as many curves as the rows have room for, two side by side where it is wide."""
    found = [(name, run.curve(name)) for name in _CURVES]
    found = [(name, points) for name, points in found if any(_finite(points))]
    beside = 2 if columns >= _WIDE and len(found) > 1 else 1
    most = max(0, rows // (_LEAST_ROWS + 1))
    found = found[: most * beside]
    if not found:
        return []
    stacks = -(-len(found) // beside)
    height = min(_MOST_ROWS, rows // stacks - 1)
    width = (columns - 2 * (beside - 1)) // beside
    lines: list[Text] = []
    for at in range(0, len(found), beside):
        pictures = [
            chart(_CURVES[name], points, width, height) for name, points in found[at : at + beside]
        ]
        for parts in zip(*pictures, strict=True):
            line = parts[0]
            for part in parts[1:]:
                line.append(" " * (width + 2 - line.cell_len)).append_text(part)
            lines.append(line)
    return lines


def chart(title: str, points: Sequence[Point], columns: int, rows: int) -> list[Text]:
    """Return a title and `rows` lines: a curve with its greatest and least value at the left."""
    shown = averaged(points, 2 * max(1, columns - 10))
    values = [value for _, value in shown]
    high, low = max(values), min(values)
    labels = [figure(high), *[""] * (rows - 2), figure(low)] if rows > 1 else [figure(high)]
    width = max(map(len, labels))
    drawn = braille(shown, max(1, columns - width - 1), rows)
    first, last = points[0][0], points[-1][0]
    head = Text(f"{title} {figure(points[-1][1])}", style="bold")
    head.append(f"  steps {count(first)} to {count(last)}", style="dim")
    lines = [
        Text(label.rjust(width) + " ", style="dim").append(line, style="not dim cyan")
        for label, line in zip(labels, drawn, strict=True)
    ]
    return [head, *lines]


def braille(points: Sequence[Point], columns: int, rows: int) -> list[str]:
    """Return a curve through finite points as lines of Braille, the greatest value at the top."""
    bits = [[0] * columns for _ in range(rows)]
    first, last = points[0][0], points[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    previous: int | None = None
    column = -1
    for step, value in points:
        at = round((step - first) / max(1, last - first) * (2 * columns - 1))
        share = (high - value) / (high - low) if high > low else 0.5
        level = round(share * (4 * rows - 1))
        for x in range(at if previous is None else min(column + 1, at), at + 1):  # without gaps
            start = level if previous is None else previous
            for y in range(min(start, level), max(start, level) + 1) if x == at else (start,):
                bits[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        previous, column = level, at
    return ["".join(chr(0x2800 + cell) for cell in line) for line in bits]


def _lanes(run: Run, columns: int) -> list[Text]:
    """Return a title and a line for each lane of the last step that was drawn, if any."""
    beat = run.beat.get("lanes")
    drawn = {
        printable(str(lane))[:12]: digits
        for lane, digits in (beat.items() if isinstance(beat, dict) else ())
        if isinstance(digits, str) and digits.isascii() and digits.isdigit()
    }
    if not drawn:
        return []
    name_width = max(map(len, drawn))
    width = max(1, min(80, columns - name_width - 7))
    shares = split_shares(run)
    parts = sorted(shares.items(), key=lambda item: -item[1])
    cause = "  ".join(f"{part} {percent(share)}" for part, share in parts[:4] if share > 0)
    lines = [Text("lanes of a step", style="bold").append(f"  {cause}", style="dim")]
    for lane, digits in drawn.items():
        busy = sum(map(int, digits)) / (9 * len(digits))
        bars = "".join(_BARS[int(digits[at * len(digits) // width])] for at in range(width))
        line = Text(lane.ljust(name_width) + " ").append(bars, style="magenta")
        lines.append(line.append(f" {busy:4.0%}", style="dim"))
    return lines


def _events(run: Run) -> list[Text]:
    """Return the last events, the newest first."""
    lines = [Text(_in_words(event), style="dim") for event in reversed(run.events[-5:])]
    return [Text("events", style="bold"), *lines] if lines else []


def _in_words(event: Mapping[str, Any]) -> str:
    details = [event.get(key) for key in ("checkpoint", "to", "reason", "error", "text")]
    known = [str(detail) for detail in details if detail is not None]
    words = [f"step {event.get('step')}: {event.get('event')}", *known]
    return printable(", ".join(words)).replace("\n", " ").replace("\t", " ")


def _finite(points: Sequence[Point]) -> list[bool]:
    return [math.isfinite(value) for _, value in points]
