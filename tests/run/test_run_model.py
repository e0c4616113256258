"""Which model of a run the verbs take: the newest whole one or the best, never another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatrain.cli.exporting import export_model
from megatrain.cli.verbs import evaluate_model, sample_from
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.disk.hf.exported import RECORD_NAME, read_exported
from megatrain.disk.hf.model import load_model
from megatrain.errors import CheckpointCorrupted, ConfigError, RunFolderError
from megatrain.memory.kinds import TensorKind
from megatrain.run.folder import FOLDER
from megatrain.run.run_model import chosen_model, tokenizer_folder
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, judge_by, run, write_world

SETTING = Setting(save_every=3, keep=3, eval_every=None)
LOSSES = [9.0, 5.0, 3.0, 4.0, 4.5]
"""Before training, and after steps 2, 4, 6 and 8: the best is step 4."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def ended_run(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of nine steps: checkpoints of 3, 6 and 9, and the export of 9."""
    path = tmp_path_factory.mktemp("ended") / "run"
    with Trainer(config_of(world, path, SETTING)) as trainer:
        trainer.train()
        assert trainer.save_model(path / "model") == "model of step 9"
    return path


@pytest.fixture(scope="module")
def patient_run(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stops early at step 8; its best is step 4. save.best is not set."""
    path = tmp_path_factory.mktemp("patient") / "run"
    config = config_of(
        world, path, Setting(save_every=None, keep=1), eval={"every": 2, "patience": 2}
    )
    with pytest.MonkeyPatch.context() as patch:
        judge_by(patch, LOSSES)
        with Trainer(config) as trainer:
            said = "eval.patience: the best checkpoint is kept and exported, as with save.best"
            assert said in trainer.notes
            trainer.train()
            assert (
                trainer.save_model(path / "model") == "model of step 4, the best of 4 evaluations"
            )
    return path


@pytest.fixture
def ended(ended_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ended_run, tmp_path / "run", symlinks=True))


@pytest.fixture
def patient(patient_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(patient_run, tmp_path / "run", symlinks=True))


def checkpoint(run: Path, step: int) -> Path:
    (found,) = [path for path in finished(run / FOLDER) if step_of(path) == step]
    return found


def weights(folder: Path) -> list[torch.Tensor]:
    home = load_model(folder, dtype="bf16", kinds=(TensorKind.HI,))
    return [home.store.param(param.name, TensorKind.HI).clone() for param in home.decoder.params]


def same(first: Path, second: Path) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


def damage(folder: Path) -> None:
    """Flip a bit of a weight."""
    path = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_the_export_of_the_newest_step_is_taken(ended: Path) -> None:
    found = chosen_model(ended)
    assert (found.folder, found.step, found.run) == (ended / "model", 9, ended)
    assert str(found) == f"model of step 9, from {ended}/model"
    assert same(ended / "model", checkpoint(ended, 9) / "model")
    assert not same(ended / "model", checkpoint(ended, 6) / "model")


def test_an_older_export_is_not_taken_for_the_newest(
    world: Path, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run was resumed with more steps and then stopped."""
    config = config_of(world, ended, SETTING, train={"steps": 15})
    assert run(config, resume=True, die=13) is None
    newest = checkpoint(ended, 12)
    assert chosen_model(ended).folder == newest / "model"
    said = export_model(ended, tmp_path / "out")
    assert "params of step 12 in" in said
    assert f"model of step 12, from {newest}/model" in capsys.readouterr().err
    assert same(tmp_path / "out", newest / "model")
    record = read_exported(tmp_path / "out")
    assert record is not None
    assert record.step == 12


@pytest.mark.parametrize("place", ["checkpoint", "export"])
def test_a_damaged_model_is_passed_over_and_reported(
    ended: Path, place: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    newest = checkpoint(ended, 9) / "model"
    if place == "checkpoint":
        shutil.rmtree(ended / "model")
        damage(newest)
        expected = checkpoint(ended, 6) / "model"
    else:
        damage(ended / "model")
        expected = newest
    assert chosen_model(ended).folder == expected
    export_model(ended, tmp_path / "out")
    said = capsys.readouterr().err
    assert "skipped: " in said
    assert "do not match their hash" in said
    assert same(tmp_path / "out", expected)


def test_if_all_models_are_damaged_none_is_used(ended: Path, world: Path, tmp_path: Path) -> None:
    damage(ended / "model")
    for path in finished(ended / FOLDER):
        damage(path / "model")
    for use in (
        lambda: export_model(ended, tmp_path / "out"),
        lambda: sample_from(ended, ["hi"], 2),
        lambda: evaluate_model(ended, world / "rows.jsonl", 2),
        lambda: export_model(checkpoint(ended, 6), tmp_path / "out"),
    ):
        with pytest.raises(CheckpointCorrupted, match="do not match their hash"):
            use()
    assert not (tmp_path / "out").exists()


def test_the_folder_of_an_export_is_checked_whoever_reads_it(
    ended: Path, world: Path, tmp_path: Path
) -> None:
    model = ended / "model"
    config = config_of(world, tmp_path / "new", SETTING, model={"name_or_path": str(model)})
    uses: list[Callable[[], object]] = [
        lambda: export_model(model, tmp_path / "out"),
        lambda: evaluate_model(model, world / "rows.jsonl", 2),
        lambda: sample_from(model, ["hi"], 2),
        lambda: Trainer(config).close(),
    ]
    assert chosen_model(model).folder == model, "it is whole so far"
    damage(model)
    for use in uses:
        with pytest.raises(CheckpointCorrupted, match="do not match their hash") as failure:
            use()
        assert f"If the change is yours, delete {model / RECORD_NAME}" in str(failure.value)
        assert failure.value.exit_code == 4
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "new" / FOLDER).exists()
    (model / RECORD_NAME).unlink()
    for use in uses:
        use()


@pytest.mark.parametrize("place", ["export", "checkpoint"])
def test_a_model_under_adapters_and_the_adapters_to_start_from_are_checked(
    ended: Path, world: Path, tmp_path: Path, place: str
) -> None:
    base = ended / "model" if place == "export" else checkpoint(ended, 9) / "model"
    over = {"name_or_path": str(base)}
    first = config_of(world, tmp_path / "first", SETTING, model=over, lora={"rank": 2})
    with Trainer(first) as trainer:
        trainer.save_model(tmp_path / "adapters")
    adapters = {"path": str(tmp_path / "adapters")}
    second = config_of(world, tmp_path / "second", SETTING, model=over, lora=adapters)
    Trainer(second, dry_run=True).close()
    assert sample_from(tmp_path / "adapters", ["hi"], 1)
    damage(tmp_path / "adapters")
    with pytest.raises(CheckpointCorrupted, match=r"adapters/adapter_model\.safetensors: bytes"):
        Trainer(second, dry_run=True)
    damage(tmp_path / "adapters")  # the same bit again: it is whole
    damage(base)
    for use in (
        lambda: Trainer(second, dry_run=True),
        lambda: sample_from(tmp_path / "adapters", ["hi"], 1),
    ):
        with pytest.raises(CheckpointCorrupted, match=r"/model/model.*: bytes"):
            use()


def test_masters_beside_a_whole_export_come_from_weights_that_were_checked(
    ended: Path, tmp_path: Path
) -> None:
    export_model(ended, tmp_path / "whole", dtype="fp32")
    damage(checkpoint(ended, 9) / "model")
    assert chosen_model(ended).folder == ended / "model"
    with pytest.raises(CheckpointCorrupted, match="do not match their hash"):
        export_model(ended, tmp_path / "out", dtype="fp32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left", ["empty", "config only", "no record", "half a record"])
def test_a_partial_export_hides_no_checkpoint(ended: Path, left: str) -> None:
    """What a kill leaves."""
    record = (ended / "model" / RECORD_NAME).read_bytes()
    if left in ("empty", "config only"):
        shutil.rmtree(ended / "model")
        (ended / "model").mkdir()
    if left == "config only":
        (ended / "model" / "config.json").write_text("{}")
    if left == "no record":
        (ended / "model" / RECORD_NAME).unlink()
    if left == "half a record":
        (ended / "model" / RECORD_NAME).write_bytes(record[: len(record) // 2])
    assert chosen_model(ended).folder == checkpoint(ended, 9) / "model"


def test_a_run_without_checkpoints_has_its_export(ended: Path) -> None:
    shutil.rmtree(ended / FOLDER)
    assert chosen_model(ended).step == 9
    damage(ended / "model")
    with pytest.raises(CheckpointCorrupted, match="no model is complete"):
        chosen_model(ended)
    (ended / "model" / RECORD_NAME).unlink()
    with pytest.raises(RunFolderError, match=r"the step of .* is unknown. Give that folder"):
        chosen_model(ended)
    assert chosen_model(ended / "model").step is None


def test_links_and_checkpoints_can_be_given(patient: Path, tmp_path: Path) -> None:
    best, last = checkpoint(patient, 4), checkpoint(patient, 8)
    for given, step in (
        (patient / "best", 4), (patient / "last", 8), (best, 4), (best / "model", 4),
        (patient / "best" / "model", 4),
    ):  # fmt: skip
        found = chosen_model(given)
        assert (found.step, found.run) == (step, patient)
    assert "params of step 4 in" in export_model(patient / "best", tmp_path / "best")
    assert same(tmp_path / "best", best / "model")
    assert not same(tmp_path / "best", last / "model")
    shutil.rmtree(best)
    with pytest.raises(RunFolderError, match="is a link to a file that no longer exists"):
        chosen_model(patient / "best")


def test_a_run_with_patience_gives_its_best_model(
    world: Path, patient: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [step_of(path) for path in finished(patient / FOLDER)] == [8, 4]
    assert same(patient / "model", checkpoint(patient, 4) / "model")
    record = read_exported(patient / "model")
    assert record is not None
    assert (record.step, record.best_loss) == (4, 3.0)
    for best in (False, True):
        found = chosen_model(patient, best=best)
        assert (found.folder, found.best_loss) == (patient / "model", 3.0)
    assert str(found).startswith("model of step 4, the best by evaluation (3.0000), from")
    sample_from(patient, ["1 + 1"], 2)
    evaluate_model(patient, world / "rows.jsonl", 4)
    assert capsys.readouterr().err.count("model of step 4, the best by evaluation") == 2
    shutil.rmtree(patient / "model")
    assert chosen_model(patient).folder == checkpoint(patient, 4) / "model"


def test_a_damaged_best_is_refused_and_not_replaced(patient: Path) -> None:
    damage(patient / "model")
    assert chosen_model(patient).folder == checkpoint(patient, 4) / "model"
    damage(checkpoint(patient, 4) / "model")
    with pytest.raises(
        CheckpointCorrupted, match=r"cannot use its best model:\n  .*\n  .*\n.*last"
    ):
        chosen_model(patient)
    assert chosen_model(patient / "last").step == 8


def test_the_best_of_what_was_never_evaluated_is_an_error(
    world: Path, ended: Path, tmp_path: Path
) -> None:
    config = config_of(world, tmp_path / "new", SETTING, data={"eval": None})
    assert run(config, die=4) is None
    with pytest.raises(RunFolderError, match="no model was evaluated"):
        chosen_model(tmp_path / "new", best=True)
    for other in (world / "model-0.0", checkpoint(ended, 6)):
        with pytest.raises(ConfigError, match="is not a run folder, so --best"):
            chosen_model(other, best=True)
    assert chosen_model(ended, best=True).step == 9, "evaluated at the end"


def test_a_best_that_was_damaged_before_the_end_is_not_exported(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(save_every=None, keep=1, best=True)
    config = config_of(world, tmp_path / "run", setting, eval={"every": 4})
    judge_by(monkeypatch, [9.0, 5.0, 6.0, 7.0])
    with Trainer(config) as trainer:
        trainer.train()
        damage(checkpoint(tmp_path / "run", 4) / "state")
        said = trainer.save_model(tmp_path / "run" / "model")
    assert said.startswith("model of step 9, the last, because the best is damaged: ")
    assert same(tmp_path / "run" / "model", checkpoint(tmp_path / "run", 9) / "model")


def test_a_killed_export_leaves_nothing_that_looks_like_a_model(
    world: Path, tmp_path: Path
) -> None:
    """Killed at any call; the next run clears away what it left beside."""
    config = config_of(world, tmp_path / "run", SETTING)
    with Trainer(config) as trainer:
        trainer.train()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatrain.disk.hf.export.rename", _killed)
            patch.setattr("megatrain.disk.hf.export.remove_folder", lambda path: None)
            with pytest.raises(KeyboardInterrupt):
                trainer.save_model(tmp_path / "run" / "model")
    assert not (tmp_path / "run" / "model").exists()
    assert list((tmp_path / "run").glob(".model.*.tmp"))
    Trainer(config).close()
    assert not list((tmp_path / "run").glob(".model.*.tmp"))


def _killed(source: Path, target: Path) -> None:
    raise KeyboardInterrupt


def test_the_tokenizer_of_a_run_is_found_without_reading_weights(ended: Path, world: Path) -> None:
    damage(ended / "model")
    assert tokenizer_folder(ended) == ended / "model"
    assert tokenizer_folder(world / "model-0.0") == world / "model-0.0"
    shutil.rmtree(ended / "model")
    assert tokenizer_folder(ended) == tokenizer_folder(ended / "last")


@pytest.mark.parametrize("value", [-1, "9", None, 2.0])
def test_a_record_that_is_not_ours_is_none(ended: Path, value: object) -> None:
    from megatrain.disk.checkpoint.manifest import signed

    path = ended / "model" / RECORD_NAME
    fields = json.loads(path.read_text())
    del fields["sha256"]
    path.write_bytes(signed(json.dumps(fields, indent=1).encode()))
    assert read_exported(ended / "model") is not None
    path.write_bytes(signed(json.dumps(fields | {"step": value}, indent=1).encode()))
    assert read_exported(ended / "model") is None
    escape = {"../../secret": fields["files"]["config.json"]}
    path.write_bytes(signed(json.dumps(fields | {"files": escape}, indent=1).encode()))
    assert read_exported(ended / "model") is None
