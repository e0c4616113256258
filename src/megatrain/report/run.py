"""A run folder, read for display: every file is optional, and damaged parts are left out.

A run may still be active, or have ended in the middle of a line. Missing parts are left out of the
report, what cannot be read is counted in `notes`. Every number is a float that may be not finite;
beyond 1e200 it counts as infinite, below 1e-200 as zero, so that drawing need not fear overflow.

Laws (tests/report/test_run.py)
    1. No content of a file raises; only a path that is not a run folder does.
    2. After a resume the later life counts: a step that comes again takes back what followed it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.config.load import file_of_run
from megatrain.errors import ConfigError, DiskError
from megatrain.report.drawing.thinning import Point

FILES = ("config.yaml", "machine.json", "plan.json", "data_card.json", "metrics.jsonl",
         "samples.jsonl", "trace.json")  # fmt: skip
_MOST_BYTES = 256 * 2**20
"""Limit for a file that is read at once."""


class SpanRecord(NamedTuple):
    """An op of a lane, in seconds from the start of the trace."""

    lane: str
    kind: str
    """The kind of the op, or `wait`."""
    name: str
    start_s: float
    end_s: float


class LedgerLine(NamedTuple):
    """The bytes in one place for one purpose."""

    place: str
    purpose: str
    num_bytes: float


class OpTimes(NamedTuple):
    """Seconds that one kind of op takes in a step."""

    kind: str
    measured_s: float
    predicted_s: float


class Sample(NamedTuple):
    """A text that the model wrote after `step` steps."""

    step: int
    prompt: str
    text: str
    expected: str = ""
    """The expected text of the row; earlier versions did not record it."""
    reward: float | None = None
    """The reward for the text, where there are rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One line of metrics about training."""

    step: int
    values: Mapping[str, float]
    split: Mapping[str, float]
    """Seconds of the step by what they went to; `other` is what the step took beyond."""
    applied: bool


@dataclass(slots=True, kw_only=True)
class Run:
    """The contents of a run folder."""

    name: str
    config: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    ledger: list[LedgerLine] = field(default_factory=list)
    measured: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    ops: Sequence[OpTimes] = ()
    """The kinds of op of a step; empty if they were not compared with the plan."""
    """Predictions for a step, if the machine was measured before."""
    data_card: Mapping[str, Any] = field(default_factory=dict)
    steps: list[StepLine] = field(default_factory=list)
    evals: list[StepLine] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    spans: list[SpanRecord] = field(default_factory=list)
    """The ops of one step, in the order of their starts."""
    notes: list[str] = field(default_factory=list)
    """Notes on files that could not be read."""

    def curve(self, name: str) -> list[Point]:
        """Return the values of `name` in the order of steps; those of evaluations start `eval`."""
        lines = self.evals if name.startswith("eval") else self.steps
        return [(line.step, line.values[name]) for line in lines if name in line.values]


def read_run(folder: Path, name: str) -> Run:
    """Return the contents of `folder`. Raises ConfigError if it is not a run folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Give a run folder.")
    if not any((folder / file).is_file() for file in FILES):
        raise ConfigError(f"{folder} is not a run folder: it has none of {', '.join(FILES)}")
    run = Run(name=name)
    run.config = (_text(file_of_run(folder)) or b"").decode("utf-8", "replace")
    run.machine = _mapping(folder / "machine.json", run.notes)
    run.data_card = _mapping(folder / "data_card.json", run.notes)
    _read_plan(_mapping(folder / "plan.json", run.notes), run)
    _read_metrics(folder / "metrics.jsonl", run)
    _read_samples(folder / "samples.jsonl", run)
    run.spans = _spans(_mapping(folder / "trace.json", run.notes))
    return run


def number(value: object) -> float | None:
    """Return a JSON number as a float, or None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        real = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    if abs(real) > 1e200:
        return math.copysign(math.inf, real)
    return 0.0 if abs(real) < 1e-200 else real


def _step(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _numbers(value: object) -> dict[str, float]:
    items = value.items() if isinstance(value, dict) else ()
    known = ((key, number(item)) for key, item in items)
    return {key: real for key, real in known if real is not None}


def _text(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise DiskError(f"cannot read {path}: {error.strerror}") from error


def _parsed(text: bytes) -> object:
    """Return the value, or None if it is not valid JSON, is too deep, or has too long numbers."""
    try:
        return json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _text(path)
    if text is None:
        return {}
    value = _parsed(text)
    if isinstance(value, dict):
        return value
    notes.append(f"could not read {path.name}")
    return {}


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a jsonl file. A last line without its end may be torn: no fault."""
    if not path.is_file():
        return
    num_bad = 0
    try:
        with path.open("rb") as file:
            for line in file:
                value = _parsed(line)
                if isinstance(value, dict):
                    yield value
                elif line.strip() and line.endswith(b"\n"):
                    num_bad += 1
    except OSError as error:
        raise DiskError(f"cannot read {path}: {error.strerror}") from error
    if num_bad:
        notes.append(f"{path.name}: could not read {num_bad:,} lines")


def _read_metrics(path: Path, run: Run) -> None:
    for line in _lines(path, run.notes):
        step = _step(line.get("step"))
        if step is None:
            continue
        evaluates = any(key.startswith("eval") for key in line)
        values = _numbers(line)
        read = StepLine(
            step=step,
            values=values,
            split=_split(_numbers(line.get("split")), values.get("seconds", 0.0)),
            applied=line.get("applied") is not False,
        )
        if evaluates:
            _forget_from(step, run.evals)
            run.evals.append(read)
        else:
            _forget_from(step + 1, run.evals)  # a step's evaluation may come before its own line
            _forget_from(step, run.steps)
            run.steps.append(read)


def _split(split: dict[str, float], seconds: float) -> dict[str, float]:
    """Return the finite and positive parts of the split, and the rest if it is over a hundredth."""
    parts = {part: value for part, value in split.items() if 0 <= value < math.inf}
    rest = seconds - math.fsum(parts.values())
    if parts and 0.01 * seconds < rest < math.inf:
        parts["other"] = rest
    return parts


def _forget_from(step: int, lines: list[StepLine]) -> None:
    while lines and lines[-1].step >= step:
        lines.pop()


def _read_samples(path: Path, run: Run) -> None:
    latest: dict[tuple[int, str], Sample] = {}
    for line in _lines(path, run.notes):
        step, prompt, text = _step(line.get("step")), line.get("prompt"), line.get("text")
        if step is not None and isinstance(prompt, str) and isinstance(text, str):
            expected = line.get("expected")
            expected = expected if isinstance(expected, str) else ""
            reward = line.get("reward")
            reward = float(reward) if isinstance(reward, int | float) else None
            latest[step, prompt] = Sample(step, prompt, text, expected, reward)
    run.samples = sorted(latest.values(), key=lambda sample: sample.step)


def _read_plan(plan: Mapping[str, Any], run: Run) -> None:
    settings, lines = plan.get("settings"), plan.get("ledger")
    run.settings = settings if isinstance(settings, dict) else {}
    run.measured = _numbers(plan.get("measured"))
    predicted = plan.get("predicted")
    run.predicted = predicted if isinstance(predicted, dict) else {}
    ops = plan.get("ops")
    run.ops = [op for op in map(_op_times, ops if isinstance(ops, list) else ()) if op is not None]
    for line in lines if isinstance(lines, list) else ():
        num_bytes = number(line.get("num_bytes")) if isinstance(line, dict) else None
        if num_bytes is not None and math.isfinite(num_bytes) and num_bytes > 0:
            place, purpose = str(line.get("place", "host")), str(line.get("purpose", ""))
            run.ledger.append(LedgerLine(place, purpose, num_bytes))


def _op_times(line: object) -> OpTimes | None:
    if not isinstance(line, dict):
        return None
    measured, predicted = number(line.get("measured_s")), number(line.get("predicted_s"))
    if measured is None or predicted is None or not math.isfinite(measured + predicted):
        return None
    return OpTimes(str(line.get("op", "")), measured, predicted)


def _spans(trace: Mapping[str, Any]) -> list[SpanRecord]:
    """Return the spans of the step that has most of them: the last list may be a mere rest."""
    events = trace.get("traceEvents")
    lanes: dict[object, str] = {}
    steps: dict[object, list[SpanRecord]] = {}
    for event in events if isinstance(events, list) else ():
        args = event.get("args") if isinstance(event, dict) else None
        if not isinstance(args, dict):
            continue
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            lanes[str(event.get("tid"))] = str(args.get("name"))
        start_us, length_us = number(event.get("ts")), number(event.get("dur"))
        if event.get("ph") != "X" or start_us is None or length_us is None:
            continue
        if math.isfinite(start_us + length_us) and length_us >= 0:
            lane = lanes.get(str(event.get("tid")), str(event.get("tid")))
            kind, name = str(event.get("cat")), str(event.get("name"))
            span = SpanRecord(lane, kind, name, start_us / 1e6, (start_us + length_us) / 1e6)
            steps.setdefault(str(args.get("step")), []).append(span)
    spans = max(steps.values(), key=len, default=[])
    first_s = min((span.start_s for span in spans), default=0.0)
    shifted = [
        span._replace(start_s=span.start_s - first_s, end_s=span.end_s - first_s) for span in spans
    ]
    return sorted(shifted, key=lambda span: span.start_s)
