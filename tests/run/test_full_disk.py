"""A disk without room: old checkpoints make way by the keep rule, and no step is given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.cli.verbs import train_from
from megatrain.config import Config, dump_config
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.disk.checkpoint.save import spare_bytes
from megatrain.disk.hf.model import load_model
from megatrain.errors import CheckpointCorrupted, DiskFull, Interrupted
from megatrain.run import checkpoints as checkpoints_module
from megatrain.run.folder import FOLDER
from megatrain.run.opening.pin_commits import read_config
from megatrain.run.trainer import Trainer
from testkit.runs import (
    Setting,
    State,
    config_of,
    differences,
    lines_of,
    run,
    state_of,
)
from testkit.small_disk import SmallDisk, small_disk

NUM_STEPS = 5
LOG_BYTES = 100_000
"""For everything in a run folder that is not a checkpoint."""

pytestmark = pytest.mark.usefixtures("cache_in_world")


@pytest.fixture(autouse=True)
def _tries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.run.saving.RETRY_S", 0.0)


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[State, Path]:
    path = tmp_path_factory.mktemp("whole") / "run"
    ended = run(config(world, path))
    assert ended is not None
    return ended, path


@pytest.fixture(scope="module")
def size(world: Path) -> tuple[int, int]:
    """The bytes of a checkpoint, and those that must be free beside it."""
    parts = checkpoint_parts(load_model(world / "model-0.0", dtype="bf16"))
    return parts.num_bytes, spare_bytes(parts)


def config(world: Path, path: Path, *, keep: int = 2, every: int = 1) -> Config:
    setting = Setting(save_every=every, keep=keep, eval_every=None)
    return config_of(world, path, setting, train={"steps": NUM_STEPS})


def room_for(count: float, size: tuple[int, int]) -> int:
    """Return a disk on which so many checkpoints fit."""
    num_bytes, spare = size
    return int(count * num_bytes) + spare + LOG_BYTES


def steps(path: Path) -> list[int]:
    return [step_of(folder) for folder in finished(path / FOLDER)]


def watch(disk: SmallDisk, run: Path) -> list[str]:
    """Return a list that gets what is deleted while no other checkpoint is whole."""
    found: list[str] = []

    def before(path: Path) -> None:
        if path.name == MANIFEST_NAME and not any(
            is_consistent(other) for other in finished(run / FOLDER) if other != path.parent
        ):
            found.append(path.parent.name)

    disk.before_unlink = before
    return found


def is_consistent(folder: Path) -> bool:
    try:
        verify(folder)
    except CheckpointCorrupted:
        return False
    return True


@pytest.mark.merge
def test_old_checkpoints_make_room_and_one_is_always_whole(
    world: Path, tmp_path: Path, whole: tuple[State, Path], size: tuple[int, int]
) -> None:
    """Two fit where three are wanted: two to keep, and one that is written."""
    path = tmp_path / "run"
    with small_disk(path, room_for(2.5, size)) as disk, Trainer(config(world, path)) as trainer:
        alone = watch(disk, path)
        (note,) = [note for note in trainer.notes if note.startswith("the disk has space for")]
        assert note == (
            "the disk has space for 2 checkpoints of 0.4 MiB, and save.keep 2 needs 3 while one is "
            "written: the oldest will be deleted before each save, not after it"
        )
        trainer.train()
        ended = state_of(trainer)
    assert differences(world, ended, path, whole) == []
    events = lines_of(path, "events.jsonl")
    assert [(event["event"], event["step"]) for event in events] == [
        ("saved", step) for step in range(1, NUM_STEPS + 1)
    ]
    assert steps(path) == [5, 4]
    assert alone == []


def test_a_rule_that_gives_up_the_newest_would_be_noticed(
    world: Path, tmp_path: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        checkpoints_module, "disposable", lambda parent, *_, **__: finished(parent)[::-1]
    )
    path = tmp_path / "run"
    with small_disk(path, room_for(1.5, size)) as disk, Trainer(config(world, path)) as trainer:
        alone = watch(disk, path)
        trainer.train()
    assert alone


def test_the_newest_stays_where_it_alone_fits_and_the_end_waits_for_room(
    world: Path,
    tmp_path: Path,
    whole: tuple[State, Path],
    size: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run"
    waited = []
    with (
        small_disk(path, room_for(1.5, size)) as disk,
        Trainer(config(world, path, keep=1)) as trainer,
    ):
        alone = watch(disk, path)

        def make_room(seconds: float) -> None:
            waited.append(steps(path))
            if len(waited) == 3:
                disk.num_bytes = room_for(3, size)

        trainer.saving.pause = make_room
        trainer.train()
        ended = state_of(trainer)
    assert waited == [[1], [1], [1]]
    assert steps(path) == [NUM_STEPS]
    assert alone == []
    assert differences(world, ended, path, whole) == []
    said = capsys.readouterr().err
    assert "only one save is possible. Set save.dir to a larger disk" in said
    for step in (2, 3, 4, 5):
        assert f"step {step}: NOT saved: {path}/checkpoints has " in said
    assert "the state after step 5 is in memory only. Waiting for space in " in said
    assert "cannot write" not in said, "the reason is the checkpoint's own"


def test_waiting_for_room_obeys_a_signal_and_a_resume_comes_to_the_same_end(
    world: Path, tmp_path: Path, whole: tuple[State, Path], size: tuple[int, int]
) -> None:
    path = tmp_path / "run"
    settings = config(world, path, keep=1)
    with small_disk(path, room_for(1.5, size)), Trainer(settings) as trainer:

        def ask_to_end(seconds: float) -> None:
            trainer.interrupts.reason = "SIGINT"

        trainer.saving.pause = ask_to_end
        with pytest.raises(
            Interrupted, match="SIGINT: stopped after step 5 of 5, saved after step 1"
        ):
            trainer.train()
    assert steps(path) == [1]
    assert differences(world, run(settings, resume=True), path, whole) == []


def test_a_save_that_failed_is_tried_again_when_there_is_room(
    world: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    """Not only when the next one is due."""
    path = tmp_path / "run"
    settings = config(world, path, keep=1, every=2)
    with small_disk(path, room_for(0.5, size)) as disk:
        with pytest.raises(
            DiskFull, match=r"has 1\.\d MiB free; a checkpoint needs 0\.\d MiB, and"
        ):
            Trainer(settings)
        disk.num_bytes = room_for(3, size)
        with Trainer(settings) as trainer:
            take = trainer._take_step

            def and_fill(step: int) -> None:
                trainer.engine.synchronize()
                trainer.checkpoints.wait()
                disk.num_bytes = room_for(0.5 if step == 2 else 3, size)
                take(step)

            trainer._take_step = and_fill  # type: ignore[method-assign]
            trainer.train(resume_from_checkpoint=True)
    events = [(event["event"], event["step"]) for event in lines_of(path, "events.jsonl")]
    assert events[:2] == [("save failed", 2), ("saved", 3)]


def test_a_quota_that_the_disk_does_not_tell_of_frees_room_too(
    world: Path, tmp_path: Path, whole: tuple[State, Path], size: tuple[int, int]
) -> None:
    path = tmp_path / "run"
    with small_disk(path, room_for(9, size)) as disk, Trainer(config(world, path)) as trainer:
        disk.tells_its_size = False
        alone = watch(disk, path)
        take = trainer._take_step

        def and_wait(step: int) -> None:
            trainer.engine.synchronize()
            trainer.checkpoints.wait()
            take(step)
            if step == 3:  # two are there, and half of one has room
                disk.num_bytes = disk.used + size[0] // 2

        trainer._take_step = and_wait  # type: ignore[method-assign]
        trainer.train()
        ended = state_of(trainer)
    assert differences(world, ended, path, whole) == []
    assert steps(path)[0] == NUM_STEPS
    assert alone == []
    failed = [e for e in lines_of(path, "events.jsonl") if e["event"] == "save failed"]
    assert failed
    assert all(len(event["deleted"]) == 1 for event in failed)


def test_a_damaged_checkpoint_makes_no_claim_on_room(
    world: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    """Of three, the newest and the oldest are damaged: the one between is not given up."""
    path = tmp_path / "run"
    assert run(config(world, path, keep=3), die=4) is None
    newest, middle, oldest = finished(path / FOLDER)
    for folder in (newest, oldest):
        (folder / "state" / "block-00001.safetensors").write_bytes(b"")
    with small_disk(path, 0) as disk:
        disk.num_bytes = disk.used + size[1]
        with Trainer(config(world, path, keep=2)) as trainer:
            alone = watch(disk, path)
            trainer.train(resume_from_checkpoint=True)
    assert alone == []
    assert newest.name not in [folder.name for folder in finished(path / FOLDER)]
    assert steps(path)[0] == NUM_STEPS
    assert step_of(middle) == 2


def test_a_damaged_checkpoint_does_not_count_for_keep(world: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = config(world, path, keep=3)
    assert run(settings, die=4) is None
    assert steps(path) == [3, 2, 1]
    (finished(path / FOLDER)[0] / "state" / "block-00001.safetensors").unlink()
    with pytest.raises(Interrupted):
        run(settings, resume=True, stop=3)
    assert steps(path) == [3, 2, 1]
    assert all(map(is_consistent, finished(path / FOLDER)))


def test_an_export_without_room_says_where_the_model_is(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(dump_config(config(world, path)))
    with small_disk(path, 1 << 30) as disk:
        save_model = Trainer.save_model

        def on_a_full_disk(self: Trainer, folder: Path) -> str:
            disk.num_bytes = disk.used + 1000
            return save_model(self, folder)

        monkeypatch.setattr(Trainer, "save_model", on_a_full_disk)
        with pytest.raises(DiskFull, match=r"saved after step 5; `megatrain export .* FOLDER`"):
            train_from(read_config(tmp_path / "run.yaml", []))
    assert not (path / "model").exists()
    assert list(path.glob(".model*")) == []
