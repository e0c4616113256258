"""A run folder, read for its report.

Every file but metrics.jsonl may be missing. A run that still trains, or died, may have left a part
of a line or of a file: that part is left out.

Invariants (tests/report/test_run.py)
    1. A file that is torn, empty or not JSON raises nothing, and `notes` names it.
    2. After a resume the later life counts: a step that comes again takes back what followed it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.config.load import file_of_run
from megatrain.errors import RunFolderError
from megatrain.files import explained

Point = tuple[int, float]
"""A step and a value, which may be not finite."""
_TOO_LARGE = 1e200
_NUM_WARM_UP_STEPS = 1
"""The first step allocates and compiles: the shares of a step's time leave it out."""


class LedgerLine(NamedTuple):
    """Planned bytes in one place for one purpose."""

    place: str
    """`host`, `pinned`, `device` or `disk`."""
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
    """The answer of the row, if it has one."""
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One line of metrics.jsonl: a step, or an evaluation."""

    step: int
    values: Mapping[str, float]
    split: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step by what they went to; `other` is what the step took beyond."""
    applied: bool = True
    """False: the step was skipped, because its gradient was not finite."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The contents of a run folder."""

    name: str
    steps: list[StepLine] = field(default_factory=list)
    evals: list[StepLine] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ledger: list[LedgerLine] = field(default_factory=list)
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Measured `host_peak_bytes` and `device_peak_bytes`."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """`step_s` and `roofline`, if the machine was measured before the run."""
    ops: list[OpTimes] = field(default_factory=list)
    """Empty if the first steps were not compared with the plan."""
    texts: dict[str, str] = field(default_factory=dict)
    """Files that are shown as they are, by name: config, plan, machine and data card."""
    notes: list[str] = field(default_factory=list)
    """Files that could not be read."""

    @property
    def objective(self) -> str:
        """What its loss measures: `reward`, `preferences` or `tokens`."""
        if self.curve("reward"):
            return "reward"
        return "preferences" if self.curve("rewards/chosen") or self.curve("kl") else "tokens"

    def curve(self, name: str) -> list[Point]:
        """Return the values of `name` in the order of steps; those of evaluations start `eval`."""
        lines = self.evals if name.startswith("eval") else self.steps
        return [(line.step, line.values[name]) for line in lines if name in line.values]

    def split_shares(self) -> dict[str, float]:
        """Return the shares of the steps' time by what it went to; empty if it was not recorded."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for line in self.steps[_NUM_WARM_UP_STEPS:] or self.steps:
            for part, value in line.split.items():
                seconds[part] += value
        total = math.fsum(seconds.values())
        return {part: value / total for part, value in seconds.items()} if total > 0 else {}


def read_run(folder: Path, name: str) -> Run:
    """Return the contents of `folder`. Raises RunFolderError if it is not a run folder."""
    if not (folder / "metrics.jsonl").exists():
        raise RunFolderError(f"{folder} has no metrics.jsonl. Give a run folder.")
    run = Run(name=name)
    _read_metrics(folder / "metrics.jsonl", run)
    _read_samples(folder / "samples.jsonl", run)
    files = (folder / name for name in ("plan.json", "machine.json", "data_card.json"))
    for path in (file_of_run(folder), *files):
        if path.is_file():
            with explained("read", path):
                run.texts[path.name] = path.read_text("utf-8", "replace")
    _read_plan(run)
    return run


def _parsed(text: str) -> Any:
    """Return the value of JSON, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects with a step of a jsonl file. A last line without its end may be torn."""
    if not path.is_file():
        return
    num_bad = 0
    with explained("read", path), path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            line = _parsed(text)
            if isinstance(line, dict) and type(line.get("step")) is int:
                yield line
            elif text.strip() and text.endswith("\n"):
                num_bad += 1
    if num_bad:
        notes.append(f"{path.name}: could not read {num_bad:,} lines")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among values, too large ones as infinite: a chart cannot add them."""
    return {
        key: float(value) if abs(value) < _TOO_LARGE or value != value else math.inf
        for key, value in values.items()
        if type(value) in (int, float)
    }


def _read_metrics(path: Path, run: Run) -> None:
    for line in _lines(path, run.notes):
        values, split = _numbers(line), line.get("split")
        read = StepLine(
            step=line["step"],
            values=values,
            split=_split(_numbers(split), values) if isinstance(split, dict) else {},
            applied=line.get("applied") is not False,
        )
        if any(key.startswith("eval") for key in line):
            _forget_from(read.step, run.evals)
            run.evals.append(read)
        else:
            _forget_from(read.step + 1, run.evals)  # an evaluation may come before its step's line
            _forget_from(read.step, run.steps)
            run.steps.append(read)


def _split(parts: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a step's time, and the rest if it is over a hundredth."""
    split = {part: seconds for part, seconds in parts.items() if 0 <= seconds < math.inf}
    seconds = values.get("seconds", 0.0)
    rest = seconds - math.fsum(split.values())
    if split and 0.01 * seconds < rest < math.inf:
        split["other"] = rest
    return split


def _forget_from(step: int, lines: list[StepLine]) -> None:
    while lines and lines[-1].step >= step:
        lines.pop()


def _read_samples(path: Path, run: Run) -> None:
    latest: dict[tuple[int, str], Sample] = {}
    for line in _lines(path, run.notes):
        step, prompt, text = line["step"], line.get("prompt"), line.get("text")
        if isinstance(prompt, str) and isinstance(text, str):
            expected, reward = line.get("expected") or "", line.get("reward")
            latest[step, prompt] = Sample(step, prompt, text, expected, reward)
    run.samples = sorted(latest.values(), key=lambda sample: sample.step)


def _read_plan(run: Run) -> None:
    if "plan.json" not in run.texts:
        return
    plan = _parsed(run.texts["plan.json"])
    if not isinstance(plan, dict):
        run.notes.append("could not read plan.json")
        return
    run.ledger = [
        LedgerLine(line["place"], line["purpose"], line["num_bytes"])
        for line in plan.get("ledger", ())
        if line["num_bytes"] > 0
    ]
    run.peaks = _numbers(plan.get("measured") or {})
    run.predicted = plan.get("predicted") or {}
    run.ops = [
        OpTimes(op["op"], op["measured_s"], op["predicted_s"]) for op in plan.get("ops") or ()
    ]
