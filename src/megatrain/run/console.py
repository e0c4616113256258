"""The output of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from megatrain.text import figure, printable


class Live:
    """Shows steps. On a terminal a bar that is overwritten; elsewhere one line per call."""

    def __init__(self, num_steps: int, *, speaks: bool = True) -> None:
        """`speaks`: false for all ranks but one."""
        self._num_steps, self._speaks = num_steps, speaks
        self._began = time.monotonic()
        self._first: int | None = None
        self._progress: Any = None
        if speaks and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=Console(stderr=True))
            self._task = self._progress.add_task("", total=num_steps)

    def step(self, metrics: dict[str, Any]) -> None:
        """Show a step's line of metrics.jsonl."""
        text = _text(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics["step"], description=text)
            return
        self.say(f"step {metrics['step']}/{self._num_steps}  {text}{self._left(metrics['step'])}")

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
        if self._first is None:
            self._first, self._began = step, time.monotonic()
            return ""
        per_step = (time.monotonic() - self._began) / (step - self._first)
        return f"  eta {_duration(per_step * (self._num_steps - step))}"

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
