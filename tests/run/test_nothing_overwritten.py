"""What is refused before a run begins, and what a dry run leaves behind: nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.cli.verbs import train_from
from megatrain.config import dump_config
from megatrain.errors import MegaTrainError, RunFolderError
from megatrain.run.opening.pin_commits import read_config
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, everything, lines_of, run, write_world

SETTING = Setting(save_every=3, eval_every=None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        yield folder


@pytest.mark.parametrize("place", ["run", "run/model", "run/model/deep", "link"])
def test_the_model_that_is_trained_from_is_never_written_over(
    world: Path, tmp_path: Path, place: str
) -> None:
    target = tmp_path / ("elsewhere" if place == "link" else place)
    shutil.copytree(world / "model-0.0", target)
    if place == "link":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "model").symlink_to(target)
    config = config_of(world, tmp_path / "run", SETTING, model={"name_or_path": str(target)})
    before = everything(tmp_path)
    for dry_run in (False, True):
        with pytest.raises(RunFolderError, match=r"is in there\. Set save\.dir to another folder"):
            Trainer(config, dry_run=dry_run)
    assert everything(tmp_path) == before


def test_the_config_that_was_given_is_never_written_over(world: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.yaml").write_text(
        "# by hand\n" + dump_config(config_of(world, project, SETTING))
    )
    before = everything(tmp_path)
    for dry_run in (False, True):
        with pytest.raises(RunFolderError, match=r"is not empty and is not a run folder"):
            train_from(read_config(project / "config.yaml", []), dry_run=dry_run)
    assert everything(tmp_path) == before


def test_a_dry_run_leaves_no_folder_even_when_it_fails(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(config_of(world, tmp_path / "run", SETTING)))
    train_from(read_config(tmp_path / "run.yaml", []), dry_run=True)
    train_from(read_config(tmp_path / "run.yaml", []), dry_run=True, resume=True)
    with pytest.raises(MegaTrainError):
        train_from(read_config(tmp_path / "run.yaml", ["model.name_or_path=missing"]), dry_run=True)
    assert list(everything(tmp_path)) == ["run.yaml"]


def test_a_dry_resume_changes_nothing(world: Path, tmp_path: Path) -> None:
    """Lines after the checkpoint stay, as do the config, the plan and saves that never ended."""
    config = config_of(world, tmp_path / "run", SETTING)
    assert run(config, die=5) is None
    (tmp_path / "run" / "checkpoints" / "step-00000005-01234567").mkdir()
    (tmp_path / "run.yaml").write_text(dump_config(config))
    before = everything(tmp_path)
    said = train_from(
        read_config(tmp_path / "run.yaml", ["train.steps=12"]), dry_run=True, resume=True
    )
    assert everything(tmp_path) == before
    assert "changed: train.steps: 9 -> 12" in said
    assert "resumed from step-00000003-" in said
    assert said.endswith("ready to train 12 steps; dry run, nothing written")
    run(config, resume=True)
    assert everything(tmp_path) != before, "what a run changes would be noticed"


@pytest.mark.merge
def test_a_resume_that_finds_nothing_says_so(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(world, tmp_path / "run", Setting(save_every=None, eval_every=None))
    with Trainer(config) as trainer:
        trainer.train(resume_from_checkpoint=True)
        said = f"nothing to resume: {tmp_path / 'run'} has no checkpoint. Starting at step 0"
        assert said in trainer.notes
    assert run(config, die=2) is None
    run(config, resume=True)
    said = capsys.readouterr().err
    assert "Starting at step 0; the lines of unsaved steps are dropped" in said
    assert [line["step"] for line in lines_of(tmp_path / "run") if "loss" in line][:2] == [1, 2]
