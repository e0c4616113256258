"""A run with a notice leaves its step, saves, and is resumed as if nothing had happened."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.errors import Interrupted
from megatrain.run import interrupts as module
from megatrain.run.folder import FOLDER
from megatrain.run.interrupts import Interrupts
from megatrain.run.trainer import Trainer
from testkit.patience import HANG_S
from testkit.runs import Setting, State, config_of, differences, lines_of, poison_at, run

pytestmark = pytest.mark.usefixtures("cache_in_world")
SETTING = Setting(save_every=100, eval_every=3, best=True)


class LeavesAt(Interrupts):
    """Asks to leave at one of the times that it is asked."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.num_asked = at, 0

    def leaves(self) -> bool:
        self.num_asked += 1
        if self.num_asked >= self.at:
            self.reason = "SIGTERM"
        return self.num_asked >= self.at


@pytest.fixture(scope="module")
def whole(
    world: Path, cache_in_world: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[State, Path]:
    path = tmp_path_factory.mktemp("whole") / "run"
    ended = run(config_of(world, path, SETTING))
    assert ended is not None
    return ended, path


def _left(world: Path, path: Path, at: int) -> tuple[int, int]:
    """Leave a run, or let it end; return the steps it has saved, and how often it was asked."""
    config = config_of(world, path, SETTING, save={"notice": "30s"})
    interrupts = LeavesAt(at)
    with Trainer(config, interrupts=interrupts) as trainer:
        with suppress(Interrupted):
            trainer.train(resume_from_checkpoint=True)
        assert trainer.checkpoints.saved_step == trainer.state.global_step
        return trainer.state.global_step, interrupts.num_asked


@pytest.mark.merge
def test_a_run_that_was_left_anywhere_ends_as_one_that_was_not(
    world: Path, tmp_path: Path, whole: tuple[State, Path]
) -> None:
    _, num_asked = _left(world, tmp_path / "all", 1 << 30)
    for number in range(6):  # in steps, evaluations and samples
        path = tmp_path / str(number)
        _left(world, path, 1 + number * num_asked // 6)
        _left(world, path, 2 + number * 7)
        config = config_of(world, path, SETTING)
        assert differences(world, run(config, resume=True), path, whole) == [], number


@pytest.mark.merge
def test_a_run_that_was_left_in_its_first_step_has_each_line_once(
    world: Path, tmp_path: Path, whole: tuple[State, Path]
) -> None:
    """The evaluation before it is not made again."""
    config = config_of(world, tmp_path / "run", SETTING, save={"notice": "30s"})
    with Trainer(config, interrupts=Interrupts()) as trainer:
        trainer.engine.should_abort = lambda: trainer.engine._num_steps == 1
        with pytest.raises(Interrupted, match="stopped after step 0 of 9, saved after step 0"):
            trainer.train()
    assert differences(world, run(config, resume=True), tmp_path / "run", whole) == []


@pytest.mark.merge
def test_an_evaluation_that_was_left_is_made_after_a_rollback_too(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is of a state before the evaluation, however often a run returns to it."""
    changes = {"save": {"notice": "30s"}, "train": {"on_nonfinite": "rollback"}}
    setting = Setting(save_every=100, eval_every=3)
    config = config_of(world, tmp_path / "run", setting, **changes)
    with Trainer(config, interrupts=Interrupts()) as trainer:
        trainer.engine.should_abort = lambda: (
            trainer.state.global_step == trainer.engine._num_steps == 3
        )
        with pytest.raises(Interrupted, match="saved after step 3"):
            trainer.train()
    poison_at(monkeypatch, 5, math.nan)
    run(config_of(world, tmp_path / "run", setting, **changes), resume=True)
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines if line.get("applied") is False] == [5]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 3, 6, 9]
    assert [line["step"] for line in lines_of(tmp_path / "run", "samples.jsonl")] == [0, 3, 6, 9]


@pytest.mark.merge
def test_a_step_of_the_data_that_is_forgotten_would_be_noticed(
    world: Path, tmp_path: Path, whole: tuple[State, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(world, tmp_path / "run", SETTING, save={"notice": "30s"})
    with monkeypatch.context() as patch, Trainer(config, interrupts=Interrupts()) as trainer:
        patch.setattr("megatrain.run.opening.training_data.TrainingData.seek", lambda *_: None)
        trainer.engine.should_abort = lambda: trainer.state.global_step == 4  # in the fifth
        with pytest.raises(Interrupted, match="stopped after step 4"):
            trainer.train()
    ended = run(config, resume=True)
    assert differences(world, ended, tmp_path / "run", whole) != []


def test_ctrl_c_finishes_the_step_whatever_the_notice() -> None:
    asked = Interrupts()
    asked.notice_s, asked.patient = 1000.0, True
    asked._receive(signal.SIGINT, None)
    assert not asked.leaves()
    assert asked.left_s is None


def test_checkpoints_come_by_the_clock(world: Path, tmp_path: Path) -> None:
    run(config_of(world, tmp_path / "run", SETTING, save={"every": "0.001s", "keep": 100}))
    steps = [step_of(path) for path in finished(tmp_path / "run" / FOLDER)]
    assert steps == list(range(9, 0, -1))


HANGS = """
import time
from megatrain.run.interrupts import Interrupts
with Interrupts() as interrupts:
    interrupts.notice_s, interrupts.patient = 1.0, True
    print("ready", flush=True)
    time.sleep({hang_s})
    time.sleep({hang_s})
"""


def test_a_process_that_hangs_ends_with_its_notice() -> None:
    command = [sys.executable, "-c", HANGS.format(hang_s=HANG_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == Interrupted.exit_code
    assert b"within 1 s" in said
    assert module._TOO_LATE in said
