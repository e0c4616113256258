"""Laws of terminal.py."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group

from megatrain.report.run import Run, StepLine, read_run
from megatrain.report.terminal import braille, frame
from tests.report.fake_runs import write_run

NOW = 1_000_000.0
BEAT = {
    "time": NOW - 2, "state": "training", "step": 200, "num_steps": 400, "step_time": NOW - 9,
    "lanes": {"fetch": "0369" * 15, "compute": "9" * 60, "update": "0" * 60},
}  # fmt: skip
EVENTS = [{"event": "saved", "step": step, "checkpoint": f"step-{step}"} for step in (100, 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "mine", num_steps=200)
    (folder / "heartbeat.json").write_text(json.dumps(BEAT))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    return folder


def texts(run: Run, columns: int, rows: int, now: float = NOW) -> list[str]:
    return [line.plain for line in frame(run, columns, rows, now)]


@pytest.mark.parametrize("columns", [20, 40, 80, 120, 400])
@pytest.mark.parametrize("rows", [10, 24, 60])
def test_a_frame_keeps_within_the_terminal(folder: Path, columns: int, rows: int) -> None:
    lines = texts(read_run(folder, "mine"), columns, rows)
    assert len(lines) <= rows
    assert max(map(cell_len, lines)) <= columns
    assert any("\u2800" < letter <= "\u28ff" for line in lines for letter in line)


def test_a_frame_has_figures_curves_lanes_and_events(folder: Path) -> None:
    lines = texts(read_run(folder, "mine"), 120, 40)
    assert lines[0] == "mine  training  last step 9 s ago"
    assert lines[1].startswith("step 200/400  50%  ")
    assert lines[2].startswith("loss 1.")
    text = "\n".join(lines)
    for title in ("tokens/s", "gradient norm", "learning rate", "lanes of a step", "events"):
        assert title in text
    lanes = {line.split()[0]: line for line in lines if line.endswith("%")}
    assert lanes["compute"].split()[1] == "\u2588" * 80
    assert "100%" in lanes["compute"]
    assert lines[-2:] == ["step 200: saved, step-200", "step 100: saved, step-100"]


def test_narrow_frames_keep_what_people_look_for_first(folder: Path) -> None:
    lines = texts(read_run(folder, "mine"), 40, 24)
    assert lines[0].startswith("mine  training")
    assert lines[1].startswith("step 200/400")
    assert lines[2].startswith("loss")
    assert "loss" in lines[3]


@pytest.mark.parametrize(
    ("beat", "said"),
    [
        ({"time": NOW - 120, "state": "training"}, "no sign of life for 2 min 00 s"),
        ({"time": NOW - 120, "state": "ended"}, "ended"),
        ({"time": NOW - 120, "state": "failed"}, "failed"),
        ({"time": "soon", "state": ["x"]}, "mine"),
        ({}, "mine"),
    ],
)
def test_the_state_is_that_of_the_heartbeat(beat: dict[str, Any], said: str) -> None:
    assert texts(Run(name="mine", beat=beat), 80, 24)[0].endswith(said)


@pytest.mark.parametrize("state", ["training", "ended", "interrupted", "failed"])
def test_a_run_that_does_not_train_has_no_time_left(state: str) -> None:
    steps = [
        StepLine(step=step, values={"seconds": 60.0, "loss": 1.0}, split={}, applied=True)
        for step in (1, 2)
    ]
    beat = {"time": NOW, "state": state, "num_steps": 6}
    shown = "\n".join(texts(Run(name="mine", steps=steps, beat=beat), 80, 24))
    assert "step 2/6  33%" in shown
    assert (" left" in shown) == (state == "training")


def test_text_of_a_folder_does_not_steer_the_terminal() -> None:
    evil = "\x1b]52;c;ZXZpbA==\x07\x1b[2J[red]\u202e"
    run = Run(name=evil, beat={"lanes": {evil: "09", "x": evil}, "state": evil})
    run.events = [{"event": evil, "step": evil, "error": f"{evil}\n{evil}", "reason": 1}]
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    console.print(Group(*frame(run, 80, 24, NOW)))
    assert not set(out.getvalue()) & {"\x1b", "\x07", "\u202e"}
    assert "[red]" in out.getvalue()


VALUES = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(VALUES, max_size=60), st.integers(20, 150), st.integers(10, 50))
def test_no_values_raise(values: list[float], columns: int, rows: int) -> None:
    steps = [
        StepLine(step=step, values={"loss": v, "seconds": v, "of_bound": v}, split={}, applied=True)
        for step, v in enumerate(values)
        if not abs(v) > 1e200 or not math.isfinite(v)
    ]
    run = Run(name="mine", steps=steps, beat={"num_steps": 100})
    lines = texts(run, columns, rows)
    assert len(lines) <= rows
    assert max(map(cell_len, lines)) <= columns


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 9))
def test_the_greatest_value_is_at_the_top_and_the_least_at_the_bottom(
    values: list[float], rows: int
) -> None:
    lines = braille(list(enumerate(values)), 30, rows)
    assert (len(lines), {len(line) for line in lines}) == (rows, {30})
    if max(values) > min(values):
        assert set(lines[0]) != {"\u2800"}
        assert set(lines[-1]) != {"\u2800"}
