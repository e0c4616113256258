"""A file system that fails to read a checkpoint: tried again, passed over, and never deleted."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.errors import DiskError, Interrupted
from megatrain.run.folder import FOLDER
from megatrain.run.trainer import Trainer
from testkit.faulty_os import READS, faulty
from testkit.rank_runs import run_on_ranks
from testkit.runs import Setting, State, config_of, differences, lines_of, run

pytestmark = pytest.mark.usefixtures("cache_in_world")


def saving(world: Path, path: Path, every: int) -> Config:
    return config_of(world, path, Setting(save_every=every, keep=2, eval_every=None))


@pytest.fixture(scope="module")
def whole(world: Path, cache_in_world: None) -> tuple[State, Path]:
    """A run that nothing disturbed."""
    ended = run(saving(world, world / "whole", 2))
    assert ended is not None
    return ended, world / "whole"


@pytest.fixture
def died(world: Path, tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 4 and 6."""
    assert run(saving(world, tmp_path / "run", 2), die=7) is None
    assert steps(tmp_path / "run") == [6, 4]
    return tmp_path / "run"


def steps(path: Path) -> list[int]:
    return [step_of(found) for found in finished(path / FOLDER)]


def unreadable(folder: Path, *, times: int = 10**9, error: int = errno.EIO) -> Any:
    """Let the system fail to open files of a folder, so many times."""
    failed: list[int] = []

    def fail(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "open" and folder in Path(os.fsdecode(args[0])).parents and len(failed) < times:
            failed.append(number)
            raise OSError(error, os.strerror(error))

    return faulty(counted=READS, before=fail)


def resumed_from(path: Path) -> list[int]:
    return [e["step"] for e in lines_of(path, "events.jsonl") if e["event"] == "resumed"]


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_an_error_that_passes_costs_no_step(
    world: Path, died: Path, whole: tuple[State, Path], error: int
) -> None:
    newest = finished(died / FOLDER)[0]
    with unreadable(newest, times=2, error=error) as calls:
        ended = run(saving(world, died, 2), resume=True)
    assert calls.num_calls > 2, "it was read"
    assert resumed_from(died) == [6]
    assert differences(world, ended, died, whole) == []


def test_one_that_stays_unreadable_is_passed_over_and_not_deleted(
    world: Path, died: Path, whole: tuple[State, Path]
) -> None:
    newest = finished(died / FOLDER)[0]
    with unreadable(newest), pytest.raises(Interrupted):
        run(saving(world, died, 1), resume=True, stop=6)
    (event,) = [e for e in lines_of(died, "events.jsonl") if e["event"] == "resumed"]
    assert event["step"] == 4
    assert "Input/output error. It may be whole, and stays" in event["skipped"][0]
    saved = [e for e in lines_of(died, "events.jsonl") if e["event"] == "saved"][-2:]
    assert [e["step"] for e in saved] == [5, 6]
    assert [name[:13] for e in saved for name in e["deleted"]] == ["step-00000004"]
    assert sorted(steps(died)) == [5, 6, 6]
    assert verify(newest).step == 6, "the disk answers again: it is whole"
    # Once as many complete ones of its step or later exist as are kept, it is one too many.
    ended = run(saving(world, died, 2), resume=True)
    assert newest not in finished(died / FOLDER)
    assert differences(world, ended, died, whole) == []


def test_one_that_is_damaged_is_still_the_first_to_go(world: Path, died: Path) -> None:
    """The sibling: with damage in place of the error, the same saves delete it."""
    newest = finished(died / FOLDER)[0]
    path = sorted((newest / "model").glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(Interrupted):
        run(saving(world, died, 1), resume=True, stop=6)
    assert newest not in finished(died / FOLDER)


def test_if_none_can_be_read_the_run_does_not_begin_and_nothing_is_deleted(
    world: Path, died: Path
) -> None:
    with (
        unreadable(died / FOLDER),
        pytest.raises(
            DiskError, match=r"none of 2 checkpoints can be used:\n  .*\n  .*"
        ) as failure,
    ):
        run(saving(world, died, 2), resume=True)
    assert "nothing was deleted" in str(failure.value)
    assert failure.value.exit_code == 5
    assert steps(died) == [6, 4]


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_not_an_empty_one(
    world: Path, died: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.iterdir

    def listed(path: Path) -> Any:
        if path == died / FOLDER:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", listed)
    with pytest.raises(DiskError, match="Input/output error"):
        Trainer(saving(world, died, 2))
    monkeypatch.undo()
    assert steps(died) == [6, 4]
    assert len(lines_of(died)) > 4, "no line was cut"


def test_ranks_pass_over_what_one_of_them_cannot_read(
    world: Path, died: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = finished(died / FOLDER)[0]

    def use(trainer: Trainer) -> int:
        return trainer.state.global_step

    with unreadable(newest, times=4 * 4):
        assert run_on_ranks(2, saving(world, died, 2), use, resume=True) == [4, 4]
    assert steps(died) == [6, 4]
