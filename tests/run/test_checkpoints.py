"""A run's checkpoints: saved while it trains, told when they fail; and the verbs for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megatrain.cli.checkpoint_verbs import save_now, verify_checkpoints
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.disk.checkpoint.save import write_checkpoint
from megatrain.errors import CheckpointCorrupted, DiskError, RunFolderError
from megatrain.files import lock
from megatrain.run import checkpoints as module
from megatrain.run.checkpoints import Checkpoints
from megatrain.run.folder import FOLDER
from megatrain.run.trainer import Trainer
from testkit.patience import HANG_S, eventually
from testkit.runs import Setting, config_of, lines_of
from testkit.warm_python import warm_python
from tests.disk.checkpoint.saving import restored, same, state_of, tiny_model, train, training

pytestmark = pytest.mark.usefixtures("cache_in_world")


def test_steps_are_taken_while_a_save_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tiny_model(tmp_path / "model")
    ended, real = threading.Event(), write_checkpoint

    def slow(*args: object, **names: object) -> Path:
        path = real(*args, **names)  # type: ignore[arg-type]
        ended.wait(HANG_S)
        return path

    monkeypatch.setattr(module, "write_checkpoint", slow)
    with training(home) as engine:
        saves = Checkpoints(tmp_path, home, engine, keep=2, keep_best=False)
        train(engine, 0, 2)
        expected = state_of(home)
        saves.begin(2, {})
        train(engine, 2, 5)
        assert saves.ended() == []
        assert saves.saved_step is None
        ended.set()
        saves.wait()
        (saved,) = saves.ended()
        assert (saved.step, saved.error) == (2, None)
        assert saves.saved_step == 2
    assert saved.path is not None
    assert not same(state_of(home), expected)
    assert same(restored(saved.path, home), expected)


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    home = tiny_model(tmp_path / "model")
    with training(home) as engine:
        saves = Checkpoints(tmp_path, home, engine, keep=1, keep_best=False)
        for step in range(1, 4):
            train(engine, step - 1, step)
            saves.begin(step, {})
        saves.wait()
        assert [saved.step for saved in saves.ended()] == [1, 2, 3]
    (kept,) = finished(tmp_path / FOLDER)
    assert verify(kept).step == 3
    assert os.readlink(tmp_path / "last") == f"{FOLDER}/{kept.name}"


def test_old_ones_that_cannot_be_deleted_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tiny_model(tmp_path / "model")

    def fail(*_: object, **__: object) -> list[str]:
        raise DiskError("cannot remove y: Input/output error")

    monkeypatch.setattr(module, "prune", fail)
    with training(home) as engine:
        saves = Checkpoints(tmp_path, home, engine, keep=1, keep_best=False)
        train(engine, 0, 1)
        saves.begin(1, {})
        saves.wait()
    (saved,) = saves.ended()
    assert saves.saved_step == 1
    assert str(saved).endswith("older ones stay: cannot remove y: Input/output error")
    assert saved.event()["event"] == "saved"
    assert saved.event()["error"] == "cannot remove y: Input/output error"


def test_a_bug_in_the_saver_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tiny_model(tmp_path / "model")

    def fail(parent: Path, parts: object, snapshot: object, *_: object, **__: object) -> Path:
        snapshot.close()  # type: ignore[attr-defined]
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(module, "write_checkpoint", fail)
    with training(home) as engine:
        saves = Checkpoints(tmp_path, home, engine, keep=1, keep_best=False)
        train(engine, 0, 1)
        saves.begin(1, {})
        with pytest.raises(ZeroDivisionError, match="planted"):
            saves.wait()
        saves.wait()  # once
        saves.begin(1, {})
        assert eventually(lambda: saves._failure)
        with pytest.raises(ZeroDivisionError, match="planted"):
            saves.ended()  # a run hears of it after its step, not at its next save


@pytest.mark.merge
def test_a_folder_removed_by_hand_does_not_end_a_run(world: Path, tmp_path: Path) -> None:
    with Trainer(config_of(world, tmp_path / "run", Setting(save_every=1))) as trainer:
        take = trainer._take_step

        def and_remove(step: int) -> None:
            take(step)
            if step == 4:
                trainer.checkpoints.wait()
                shutil.rmtree(tmp_path / "run" / FOLDER)

        trainer._take_step = and_remove  # type: ignore[method-assign]
        trainer.train()
    assert verify(finished(tmp_path / "run" / FOLDER)[0]).step == 9


# The verbs


def _megatrain(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*warm_python().command, "-m", "megatrain", *words],
        capture_output=True, text=True, timeout=2 * HANG_S, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ended(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ended") / "run"
    with Trainer(config_of(world, path, Setting())) as trainer:
        trainer.train()
    return path


def test_save_now_brings_a_checkpoint_of_a_running_training(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path / "run", Setting(save_every=None), train={"steps": 10**6})
    said: list[str] = []

    def ask() -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.01)
        done = _megatrain("save", str(tmp_path / "run"), "--wait", str(HANG_S))
        said.append(done.stdout + done.stderr)
        trainer.interrupts.reason = "the test has what it wants"

    with Trainer(config) as trainer:
        thread = threading.Thread(target=ask)
        thread.start()
        with pytest.raises(Exception, match="the test has what it wants"):
            trainer.train()
        thread.join()
    folders = finished(tmp_path / "run" / FOLDER)
    assert len(folders) == 2
    assert said == [
        f"saved in {folders[1]}\n"
        "save.keep is 2: it is deleted once 2 newer checkpoints exist. To keep it longer, copy it "
        "or run `megatrain export`.\n"
    ]
    assert not (tmp_path / "run" / ".save").exists()


def test_save_now_where_nobody_trains(ended: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no process is training there"):
        save_now(ended, 1)
    with pytest.raises(RunFolderError, match=r"has no metrics\.jsonl\. Give a run folder"):
        save_now(tmp_path, 1)
    done = _megatrain("save", str(ended))
    assert done.returncode == 5
    assert done.stderr.startswith("RunFolderError [MT502]")


def test_save_now_that_is_not_answered(ended: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ended, tmp_path / "run", symlinks=True))
    fd = lock(copy / ".lock")
    try:
        with pytest.raises(RunFolderError, match=r"none appeared in 0\.1 s.*see events\.jsonl"):
            save_now(copy, 0.1)
    finally:
        os.close(fd)


def test_verify_says_what_is_whole(ended: Path, tmp_path: Path) -> None:
    done = _megatrain("verify", str(ended))
    assert done.returncode == 0, done.stderr
    newest, older = (path.name for path in finished(ended / FOLDER))
    assert done.stdout.startswith(f"{newest}: complete, step 9, ")
    assert f"\n{older}: complete, step 8, " in done.stdout
    assert verify_checkpoints(ended / FOLDER / older).startswith(f"{older}: complete")


def test_verify_names_what_is_damaged(ended: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ended, tmp_path / "run", symlinks=True))
    newest, older = finished(copy / FOLDER)
    (newest / "state" / "block-00001.safetensors").unlink()
    done = _megatrain("verify", str(copy))
    assert done.returncode == 4
    assert done.stderr.startswith("CheckpointCorrupted [MT409]")
    assert f"{newest.name}: DAMAGED: {newest}/state/block-00001.safetensors is missing" in (
        done.stderr
    )
    assert f"{older.name}: complete" in done.stderr
    assert done.stderr.endswith("1 of 2 damaged\n")


def test_verify_of_nothing(ended: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"neither a run folder nor a checkpoint"):
        verify_checkpoints(tmp_path)
    with pytest.raises(RunFolderError, match=rf"has the checkpoints of a run. Give {ended}\."):
        verify_checkpoints(ended / FOLDER)
    torn = shutil.copytree(finished(ended / FOLDER)[0], tmp_path / "torn")
    (torn / "manifest.json").unlink()
    with pytest.raises(CheckpointCorrupted, match="incomplete save"):
        verify_checkpoints(torn)
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(CheckpointCorrupted, match="no complete checkpoint here"):
        verify_checkpoints(tmp_path)
    with pytest.raises(RunFolderError, match=r"nope: no such folder$"):
        verify_checkpoints(tmp_path / "nope")
    assert lines_of(ended)


def test_a_model_is_not_called_a_damaged_checkpoint(ended: Path) -> None:
    model = finished(ended / FOLDER)[0] / "model"
    with pytest.raises(RunFolderError, match="is a model, not a checkpoint or a run folder"):
        verify_checkpoints(model)
