"""The output of a run: lines of steps, and on a terminal a live line below them.

A line of a step that is logged stays, on a terminal too. The live line shows the step, the time
left and, of a step that is not logged, its figures. Where a terminal is narrow, a line of a step
keeps as many figures as fit, from the left; step, loss and time left are never cut.
"""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from megatrain.text import figure, printable

_BAR_COLUMNS = 24
_ROOM_FOR_BAR = 70
"""Columns of a terminal that has room for a bar beside the loss."""


class Live:
    """Shows steps: a line for each that is logged, and on a terminal one for where the run is."""

    def __init__(self, num_steps: int, *, speaks: bool = True) -> None:
        """`speaks`: false where another process prints."""
        self._num_steps = num_steps
        self._speaks = speaks
        self._began = time.monotonic()
        self._first: int | None = None
        self._progress: Any = None
        if speaks and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
            from rich.table import Column

            console = Console(stderr=True)
            whole = Column(no_wrap=True, min_width=2 * len(str(num_steps)) + len("step /"))
            figures = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            columns: list[ProgressColumn] = [
                TextColumn("step {task.completed}/{task.total}", table_column=whole),
                BarColumn(bar_width=_BAR_COLUMNS),
                TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True, min_width=10)),
                TextColumn("{task.description}", table_column=figures),
            ]
            if console.width < _ROOM_FOR_BAR:
                del columns[1]
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task("", total=num_steps, left="")

    def step(self, metrics: dict[str, Any], *, stays: bool = True) -> None:
        """Show a step's line of metrics.jsonl. One that does not stay is shown on a terminal."""
        figures, step = _figures(metrics), metrics["step"]
        left = self._left(step)
        if self._progress is not None:
            shown = "" if stays else "  ".join(figures)
            self._progress.update(self._task, completed=step, description=shown, left=left)
        if stays:
            self.say(self._line(f"step {step}/{self._num_steps}", figures, left))

    def _line(self, head: str, figures: list[str], left: str) -> str:
        """Return the line of a step, on a terminal with no more figures than fit into it."""
        line = "  ".join(filter(None, [head, *figures, left]))
        if self._progress is None or len(line) <= self._progress.console.width or not figures[1:]:
            return line
        return self._line(head, figures[:-1], left)

    def say(self, text: str) -> None:
        """Print a line that stays. A terminal or pipe that is gone must not end a run."""
        if not self._speaks:
            return
        text = printable(text)  # it may quote a row or an answer
        with suppress(OSError):
            if self._progress is not None:
                console = self._progress.console
                lines = [_wrapped(line, console.width) for line in text.split("\n")]
                console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=sys.stderr, flush=True)

    def _left(self, step: int) -> str:
        if self._first is None or step <= self._first:  # it may go back to a checkpoint
            self._first = step
            self._began = time.monotonic()
            return ""
        per_step = (time.monotonic() - self._began) / (step - self._first)
        return f"eta {_duration(per_step * (self._num_steps - step))}"

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            with suppress(OSError):
                self._progress.stop()


def _figures(metrics: dict[str, Any]) -> list[str]:
    """Return the figures of a step, those that people look for first."""
    if "loss" not in metrics:
        return [str(metrics.get("fault", ""))]
    norm = metrics.get("grad_norm")
    parts = [
        f"loss {metrics['loss']:.4f}",
        "" if metrics.get("applied", True) else "SKIPPED: not finite",
        f"aux {metrics['aux_loss']:.4f}" if "aux_loss" in metrics else "",
        f"reward {metrics['reward']:.3f}" if "reward" in metrics else "",
        preference_words(metrics),
        "" if norm is None else f"norm {norm:.3g}",
        f"lr {metrics['learning_rate']:.3g}",
        f"{metrics['seconds']:.3g} s",
        f"{figure(metrics['tokens_per_s'])} tok/s",
        _share_of_roofline(metrics),
    ]
    return [part for part in parts if part]


def _share_of_roofline(metrics: Mapping[str, Any]) -> str:
    """Return how near a step came to the least time that the plan allows, where that is known."""
    share = metrics.get("of_roofline")
    return "" if share is None else f"{share:.0%} of roofline ({metrics['roofline']})"


def _wrapped(line: str, columns: int) -> str:
    """Return a line in pieces of so many columns, all but the first indented."""
    if len(line) <= columns:
        return line
    label = re.match(r"\w+( \w+)? {2,}| {4,}", line)  # beside which its text stands
    indent = 4 if label is None else label.end()
    return textwrap.fill(
        line,
        columns,
        subsequent_indent=" " * min(indent, columns // 4),
        break_long_words=False,
        break_on_hyphens=False,
    )


def preference_words(figures: Mapping[str, Any]) -> str:
    """Return what a loss over preferences reports, in few words; nothing for other losses."""
    found = {name: figures.get(f"rewards/{name}") for name in ("margins", "accuracies")}
    words = [
        "" if found["margins"] is None else f"margin {found['margins']:.3g}",
        "" if found["accuracies"] is None else f"right {found['accuracies']:.0%}",
    ]
    return "  ".join(word for word in words if word)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours else f"{minutes}m{rest:02}" if minutes else f"{rest}s"
