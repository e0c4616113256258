"""Signs of life of a run, for machines that watch it: heartbeat.json and metrics.prom.

    heartbeat.json    the time, the process, the step and the lanes of a step; every few seconds
    metrics.prom      the same figures for Prometheus: node_exporter's textfile collector reads it

    with Signs(config, folder, say, num_steps) as signs:    # rank 0 alone writes
        ...                                                 # it hears the lines of the folder

A thread of its own writes both files whole, beside and then renamed, also while a step takes long:
`time` tells that the process lives, `step_time` when it last finished a step. The run never waits
for that thread, but for its last writing at the end, and no longer than a few seconds. What is
trouble goes to alarms.py.

Laws (tests/run/test_signs.py)
    1. Both files are complete at every instant, and have the figures of the last lines.
    2. A run without them, or with a disk that refuses them, has the same bits and lines.
    3. The last state is that of the end: ended, interrupted or failed.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from megatrain.config import Config
from megatrain.errors import DiskError, Interrupted
from megatrain.lanes.trace import Span
from megatrain.progress import Say
from megatrain.run.alarms import Alarms, Troubles
from megatrain.run.folder import RunFolder

HEARTBEAT, PROMETHEUS = "heartbeat.json", "metrics.prom"
BEAT_S = 5.0
"""Time between two writings."""
LANE_COLUMNS = 60
_FIGURES = {
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("gradient_norm", "Norm of the last gradient, before clipping."),
    "learning_rate": ("learning_rate", "Learning rate of the last step."),
    "seconds": ("step_seconds", "Time of the last step."),
    "tokens_per_s": ("tokens_per_second", "Tokens per second of the last step."),
    "of_bound": ("of_bound_ratio", "Least time of a step by the plan over its time."),
    "eval_loss": ("eval_loss", "Loss of the last evaluation."),
}
"""Names of figures by their name in metrics.jsonl, and what they are."""


class Signs:
    """The signs of one run. Use it in a `with` block."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        say: Say,
        num_steps: int,
        *,
        step: int = 0,
        saved_step: int | None = None,
        speaks: bool = True,
    ) -> None:
        """The run is at `step`, and was saved at `saved_step`; `speaks`: false where another
        process does.
        """
        self._folder = folder
        self._say = say
        self._speaks = speaks and not folder.is_dry
        self._num_steps = num_steps
        self._state = "training"
        self._step = step
        self._step_time = 0.0
        self._began = time.time()
        self._last: dict[str, Any] = {"saved_step": saved_step}
        self._counts = {"failed_saves": 0, "spikes": 0}
        self._lanes: dict[str, str] = {}
        self._drawn_s = -BEAT_S
        self._troubles = Troubles()
        wanted = config.log.on_trouble
        self._alarms = Alarms(wanted if self._speaks else None, folder.path, say)
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs of a run", daemon=True)

    def hear(self, name: str, record: Mapping[str, Any]) -> None:
        """Take note of a line of the run folder. Raises nothing."""
        try:
            with self._mutex:
                self._take(name, record)
                trouble = self._troubles.heard(name, record, time.monotonic())
            self._alarms.send(trouble)
        except Exception as error:  # it only explains the run
            self._folder.heard = None
            self._say(f"{HEARTBEAT}: {type(error).__name__}: {error}. Training continues without")

    def draw(self, spans: Sequence[Span]) -> None:
        """Take note of the lanes of a step, if the last ones were drawn some seconds ago."""
        if self._speaks and time.monotonic() - self._drawn_s >= BEAT_S:
            drawn = lanes_drawn(spans)
            with self._mutex:
                self._lanes, self._drawn_s = drawn, time.monotonic()

    def _take(self, name: str, record: Mapping[str, Any]) -> None:
        if name == "metrics.jsonl":
            self._last |= record
            if "learning_rate" in record or "fault" in record:
                self._step, self._step_time = record["step"], time.time()
            self._counts["spikes"] += "spike" in record
        elif record.get("event") == "saved":
            self._last |= {"saved_step": record["step"], "saved_time": time.time()}
        elif record.get("event") == "save failed":
            self._counts["failed_saves"] += 1

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._write()
            with self._mutex:
                trouble = self._troubles.overdue(time.monotonic())
            self._alarms.send(trouble)
        self._write()

    def _write(self) -> None:
        with self._mutex:
            beat, figures = self._heartbeat(), "\n".join(self._samples()) + "\n"
        with suppress(DiskError, OSError):  # the folder reports a disk that fails
            self._folder.write_json(HEARTBEAT, beat)
            self._folder.write(PROMETHEUS, figures)

    def _heartbeat(self) -> dict[str, Any]:
        return {
            "time": time.time(),
            "state": self._state,
            "step": self._step,
            "num_steps": self._num_steps,
            "step_time": self._step_time or None,
            "saved_step": self._last.get("saved_step"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "lanes": self._lanes,
        }

    def _samples(self) -> Iterator[str]:
        """Yield the lines of metrics.prom."""
        run = f'run="{_escaped(str(self._folder.path.absolute()))}"'

        def sample(name: str, text: str, value: object, kind: str = "gauge") -> Iterator[str]:
            if isinstance(value, int | float):
                yield f"# HELP megatrain_{name} {text}"
                yield f"# TYPE megatrain_{name} {kind}"
                yield f"megatrain_{name}{{{run}}} {_number(value)}"

        last, counts = self._last, self._counts
        yield from sample("running", "Whether the run trains.", int(self._state == "training"))
        yield from sample("heartbeat_timestamp_seconds", "When this was written.", time.time())
        yield from sample("step", "Steps that are done.", self._step)
        yield from sample("steps", "Steps of the run.", self._num_steps)
        # Until the first one the beginning, so that an alert finds a run that never gets there.
        done = "When the last step was done, or the process began."
        yield from sample("step_timestamp_seconds", done, self._step_time or self._began)
        for key, (name, text) in _FIGURES.items():
            yield from sample(name, text, last.get(key))
        tokens = last.get("total_tokens")
        yield from sample("tokens_total", "Tokens trained on.", tokens, "counter")
        yield from sample("saved_step", "Step of the last save.", last.get("saved_step"))
        saved = "When the last save was complete, or the process began."
        yield from sample("saved_timestamp_seconds", saved, last.get("saved_time", self._began))
        failed = "Saves that failed, of this process."
        yield from sample("failed_saves_total", failed, counts["failed_saves"], "counter")
        yield from sample("spikes_total", "Spikes, of this process.", counts["spikes"], "counter")
        if split := last.get("split"):
            yield "# HELP megatrain_step_part_seconds Time of the last step by cause."
            yield "# TYPE megatrain_step_part_seconds gauge"
            for part, seconds in split.items():
                label = f'part="{_escaped(part)}"'
                yield f"megatrain_step_part_seconds{{{run},{label}}} {_number(seconds)}"

    def __enter__(self) -> Self:
        if self._speaks:
            self._folder.heard = self.hear
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        """Write the end, and report an error; neither takes longer than its limit."""
        if not self._speaks:
            return
        self._folder.heard = None
        with self._mutex:
            if error is not None:
                asked = isinstance(error, Interrupted) or not isinstance(error, Exception)
                self._state = "interrupted" if asked else "failed"
                trouble = self._troubles.ended(error, self._step, time.monotonic())
            else:
                self._state, trouble = "ended", None
        self._alarms.send(trouble)
        self._ended.set()
        self._thread.join(BEAT_S)
        self._alarms.close()


def lanes_drawn(spans: Sequence[Span], columns: int = LANE_COLUMNS) -> dict[str, str]:
    """Return how busy each lane was, from the first start to the last end: a digit per column.

    0 is idle, 9 is busy all the time.
    """
    first = min((span.start_ns for span in spans), default=0)
    width = max(1, max((span.end_ns for span in spans), default=0) - first) / columns
    busy: dict[str, list[float]] = {}
    for span in spans:
        bins = busy.setdefault(span.lane, [0.0] * columns)
        if span.awaited is not None:
            continue
        start, end = (span.start_ns - first) / width, (span.end_ns - first) / width
        for column in range(int(start), min(columns, math.ceil(end))):
            bins[column] += min(end, column + 1) - max(start, column)
    return {
        lane: "".join(str(min(9, math.ceil(9 * share - 1e-9))) for share in bins)
        for lane, bins in busy.items()
    }


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str) -> str:
    """Return the text of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
