"""A disk that is full or fails at any call of a whole run: nothing is lost, training goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain import files
from megatrain.config import Config
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import DiskError, Interrupted, MegaTrainError
from megatrain.run.folder import FOLDER
from megatrain.run.trainer import Trainer
from testkit.faulty_os import CHANGES, faulty
from testkit.runs import (
    Setting,
    State,
    config_of,
    differences,
    lines_of,
    state_of,
    write_world,
)

ENOSPC, EIO = 28, 5
NUM_STEPS = 4
SETTING = Setting(save_every=2, keep=1, eval_every=None)
GROWING = frozenset({"pwrite", "posix_fallocate", "mkdir", "symlink"})
"""What a full disk refuses; it still lets go of what is there."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        yield folder


def _config(world: Path, run: Path) -> Config:
    return config_of(world, run, SETTING, train={"steps": NUM_STEPS})


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[State, Path]:
    path = tmp_path_factory.mktemp("whole") / "run"
    with Trainer(_config(world, path)) as trainer:
        trainer.train()
        return state_of(trainer), path


def _run(config: Config, *, resume: bool = False, **faults: Any) -> tuple[State | None, list[str]]:
    """Train under faults; return the end, or None if it did not begin, and the calls made."""
    with faulty(**faults) as calls:
        try:
            trainer = Trainer(config)
        except MegaTrainError:
            return None, [name for name, _ in calls.log]
        with trainer:
            trainer.train(resume_from_checkpoint=resume)
            return state_of(trainer), [name for name, _ in calls.log]


def _left(run: Path) -> list[str]:
    """Return what should not be there: temporary files, and saves that never ended."""
    unfinished = [
        path.name for path in (run / FOLDER).glob("step-*") if not (path / "manifest.json").exists()
    ]
    return unfinished + [path.name for path in run.rglob("*.tmp")]


def _check(world: Path, run: Path, whole: tuple[State, Path], **faults: Any) -> int:
    """Run under one fault; return how many calls there were."""
    config = _config(world, run)
    ended, calls = _run(config, **faults)
    if ended is None:  # said before anything was lost: begin again
        ended, _ = _run(config, resume=True)
    assert differences(world, ended, run, whole) == []
    newest = finished(run / FOLDER)[0]
    assert verify(newest).step == NUM_STEPS
    told = [event for event in lines_of(run, "events.jsonl") if "error" in event]
    if not any(event["event"] == "saved" for event in told):  # an old one that could not go
        assert _left(run) == []
    return len(calls)


@pytest.fixture(scope="module")
def num_calls(world: Path, whole: tuple[State, Path], tmp_path_factory: Any) -> int:
    return _check(world, tmp_path_factory.mktemp("count") / "run", whole)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(16))
def test_one_failing_call_loses_nothing(
    world: Path, tmp_path: Path, whole: tuple[State, Path], num_calls: int, number: int
) -> None:
    fail_at = random.Random(number).randrange(num_calls)
    _check(world, tmp_path / "run", whole, fail_at=fail_at, error=(ENOSPC, EIO)[number % 2])


@pytest.mark.long
@pytest.mark.parametrize("error", [ENOSPC, EIO])
def test_any_one_failing_call_loses_nothing(
    world: Path, tmp_path: Path, whole: tuple[State, Path], num_calls: int, error: int
) -> None:
    for fail_at in range(num_calls):
        _check(world, tmp_path / str(fail_at), whole, fail_at=fail_at, error=error)


def test_a_fault_that_loses_a_line_would_be_noticed(
    world: Path, tmp_path: Path, whole: tuple[State, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.append

    def forgetful(path: Path, data: bytes, start: int | None = None) -> None:
        if b'"step": 3' not in data:
            real(path, data, start)

    monkeypatch.setattr(files, "append", forgetful)
    ended, _ = _run(_config(world, tmp_path / "run"))
    assert differences(world, ended, tmp_path / "run", whole) == ["metrics.jsonl"]


class _FullAfter:
    """Refuses what grows the disk between two steps."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.step = first, last, 0

    def __call__(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        if self.first <= self.step < self.last:
            raise OSError(ENOSPC, os.strerror(ENOSPC))


def _train_on_full_disk(config: Config, full: _FullAfter) -> State:
    with faulty(before=full, counted=GROWING), Trainer(config) as trainer:
        take = trainer._take_step

        def give_up(seconds: float) -> None:
            trainer.interrupts.reason = "nobody makes room"

        trainer.saving.pause = give_up

        def counted(step: int) -> None:
            trainer.engine.synchronize()
            trainer.checkpoints.wait()  # a save is of its step, not of when it came to an end
            full.step = step
            take(step)

        trainer._take_step = counted  # type: ignore[method-assign]
        trainer.train()
        return state_of(trainer)


def test_a_disk_that_was_full_for_a_while_costs_no_line(
    world: Path, tmp_path: Path, whole: tuple[State, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    ended = _train_on_full_disk(_config(world, run), _FullAfter(2, 4))
    assert differences(world, ended, run, whole) == []
    events = [(event["event"], event["step"]) for event in lines_of(run, "events.jsonl")]
    assert events == [("save failed", 2), ("saved", 4)]
    assert _left(run) == []
    said = capsys.readouterr().err
    assert "No space left on device. Training continues; metrics and events wait in memory." in said
    assert "step 2: NOT saved: cannot write" in said
    assert "metrics and events are on disk again" in said


def test_a_disk_that_stays_full_ends_nothing_before_the_last_step(
    world: Path, tmp_path: Path, whole: tuple[State, Path]
) -> None:
    """What was saved before is whole, and a resume with room on the disk comes to the same end."""
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match="stopped after step 4 of 4, saved after step 2"):
        _train_on_full_disk(_config(world, run), _FullAfter(3, 100))
    (kept,) = finished(run / FOLDER)
    assert verify(kept).step == 2
    assert _left(run) == []
    ended, _ = _run(_config(world, run), resume=True)
    assert differences(world, ended, run, whole) == []


def test_short_writes_lose_nothing(
    world: Path, tmp_path: Path, whole: tuple[State, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, shortened = os.pwrite, []

    def some(fd: int, memory: memoryview, offset: int) -> int:
        short = len(memory) // 2 // 4096 * 4096 if len(memory) > 4096 else len(memory)
        if len(memory) % 4096:  # not a direct one: any number of bytes
            short = max(1, len(memory) // 2)
        shortened.append(len(memory) - short)
        return real(fd, memory[:short], offset)

    monkeypatch.setattr(os, "pwrite", some)
    _check(world, tmp_path / "run", whole)
    assert sum(count > 0 for count in shortened) > 50


def test_a_line_torn_by_a_full_disk_is_made_whole(tmp_path: Path) -> None:
    from megatrain.run.folder import RunFolder

    real = os.pwrite
    room = [40]

    def until_full(fd: int, memory: memoryview, offset: int) -> int:
        if room[0] == 0:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        count = min(len(memory), room[0])
        room[0] -= count
        return real(fd, memory[:count], offset)

    with RunFolder(tmp_path) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", until_full)
        for step in range(6):
            folder.append("metrics.jsonl", {"step": step})
        assert folder.trouble is not None
        assert "No space left" in folder.trouble
        with pytest.raises(DiskError, match="No space left"):
            folder.lengths()
        assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
        room[0] = 1000
        folder.append("samples.jsonl", {"step": 6})
        assert folder.trouble is None
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(6))


def test_the_calls_of_a_run_are_counted(num_calls: int) -> None:
    assert num_calls > 150
    assert "write" in CHANGES
