"""The output of a run: lines of steps, and on a terminal a live line below them.

On a terminal a line of a step stays every KEPT_EVERY_S seconds, and with the last step; the others
are overwritten. Elsewhere each stays. Where the terminal is narrow, the bar goes first, then the
figures from the right: step and time left are never cut.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from megatrain.text import figure, printable

KEPT_EVERY_S = 10.0
_BAR_COLUMNS = 24
_ROOM_FOR_BAR = 110
"""Columns of a terminal that has room for a bar beside the usual figures."""


class Live:
    """Shows steps: a line for each call, of which a terminal keeps one now and then."""

    def __init__(
        self, num_steps: int, *, speaks: bool = True, kept_every_s: float = KEPT_EVERY_S
    ) -> None:
        """`speaks`: false where another process prints. On a terminal a line stays every
        `kept_every_s` seconds."""
        self._kept = -math.inf
        self._kept_every_s = kept_every_s
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

    def step(self, metrics: dict[str, Any]) -> None:
        """Show a step's line of metrics.jsonl."""
        text, step = _text(metrics), metrics["step"]
        left = self._left(step)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text, left=left)
            if not self._stays(step):
                return
        ends = f"  {left}" if left else ""
        self.say(f"step {step}/{self._num_steps}  {text}{ends}")

    def _stays(self, step: int) -> bool:
        """Return whether the line of a step stays on a terminal."""
        now = time.monotonic()
        if step < self._num_steps and now - self._kept < self._kept_every_s:
            return False
        self._kept = now
        return True

    def say(self, text: str) -> None:
        """Print a line that stays. A terminal or pipe that is gone must not end a run."""
        if not self._speaks:
            return
        text = printable(text)  # it may quote a row or an answer
        with suppress(OSError):
            if self._progress is not None:
                self._progress.console.print(text, markup=False, highlight=False)
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


def _text(metrics: dict[str, Any]) -> str:
    if "loss" not in metrics:
        return str(metrics.get("fault", ""))
    norm = metrics.get("grad_norm")
    parts = [
        f"loss {metrics['loss']:.4f}",
        f"aux {metrics['aux_loss']:.4f}" if "aux_loss" in metrics else "",
        preference_words(metrics),
        "" if norm is None else f"norm {norm:.3g}",
        f"lr {metrics['learning_rate']:.3g}",
        f"{metrics['seconds']:.3g} s",
        f"{figure(metrics['tokens_per_s'])} tok/s",
        f"{metrics['of_bound']:.0%} of bound ({metrics['bound']})" if "bound" in metrics else "",
        "" if metrics.get("applied", True) else "SKIPPED: not finite",
    ]
    return "  ".join(part for part in parts if part)


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
