"""What a resume takes, passes over and refuses; that it goes on in the same bits: test_resume."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import CheckpointMismatch
from megatrain.optim.states import WITH_CLIP
from megatrain.planning.levers import KEPT
from megatrain.run.folder import FOLDER
from megatrain.run.opening.resumption import (
    FIXED,
    LoadedCheckpoint,
    changed_settings,
    find_checkpoint,
    known_of,
    resume,
)
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, run, write_world

SETTING = Setting(save_every=3, keep=2, eval_every=None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        run(config_of(folder, folder / "run", SETTING))
        yield folder


@pytest.fixture
def manifest(world: Path) -> Manifest:
    return read_manifest(finished(world / "run" / FOLDER)[0])


def _resumed(folder: Path, config: Config) -> LoadedCheckpoint | None:
    """Find a checkpoint, and load it, as a run does."""
    found = find_checkpoint(config, folder)
    return None if found is None else resume(folder, config, found.model.empty(WITH_CLIP))


def _with(manifest: Manifest, **training: Any) -> Manifest:
    return Manifest(step=9, files={}, model="", training={**manifest.training, **training})


def _changed(manifest: Manifest, section: str, key: str, value: Any) -> Manifest:
    training = json.loads(json.dumps(manifest.training))
    training["config"][section][key] = value
    return Manifest(
        step=manifest.step, files=manifest.files, model=manifest.model, training=training
    )


def test_every_setting_may_change_or_may_not(world: Path, manifest: Manifest) -> None:
    config = config_of(world, world / "run", SETTING)
    assert changed_settings(config, manifest) == []
    for section, values in config.model_dump(mode="json").items():
        for key in values:
            other = _changed(manifest, section, key, "something else")
            if key in FIXED.get(section, ()):
                with pytest.raises(CheckpointMismatch, match=rf"\n  {section}\.{key}: something"):
                    changed_settings(config, other)
            else:
                (said,) = changed_settings(config, other)
                assert said.startswith(f"{section}.{key}: something else -> ")


@pytest.mark.parametrize("config", [None, 5, "x", []])
def test_a_checkpoint_without_settings_is_refused(
    world: Path, manifest: Manifest, config: Any
) -> None:
    training = {**manifest.training, "config": config}
    other = Manifest(step=9, files={}, model="", training=training)
    with pytest.raises(CheckpointMismatch, match="has no settings"):
        changed_settings(config_of(world, world / "run", SETTING), other)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run", None), ("run", {}), ("run", {"step": 9}), ("num_updates", None),
        ("num_updates", [[0]]), ("num_updates", [[0, -1]]), ("num_updates", 5), ("data", None),
        ("data", {"order": "x", "epoch": 0, "window": 0}), ("lines", []),
        ("lines", {"metrics.jsonl": "x"}),
    ],
)  # fmt: skip
def test_an_invalid_state_is_refused(manifest: Manifest, key: str, value: Any) -> None:
    assert known_of(manifest).state.global_step == 9
    with pytest.raises(CheckpointMismatch, match="has an invalid state of the run: "):
        known_of(_with(manifest, **{key: value}))


@pytest.mark.parametrize("value", ["auto", "fp64", None, 8, ["fp32"], {}])
def test_optimizer_states_of_no_known_precision_are_refused(manifest: Manifest, value: Any) -> None:
    assert known_of(_changed(manifest, "optim", "state", "8bit")).state_dtype == "8bit"
    with pytest.raises(CheckpointMismatch, match="has an invalid state of the run: "):
        known_of(_changed(manifest, "optim", "state", value))


def test_a_state_that_lacks_something_is_refused(manifest: Manifest) -> None:
    for key in {*manifest.training} - {"eval_loss"}:  # `loss_of` reads it
        less = {name: value for name, value in manifest.training.items() if name != key}
        other = Manifest(step=9, files={}, model="", training=less)
        with pytest.raises(CheckpointMismatch, match=f"state of the run: KeyError '{key}'"):
            known_of(other)


def test_what_the_bits_depend_on_is_saved_and_kept(manifest: Manifest) -> None:
    kept = known_of(manifest).kept
    assert set(kept) == {lever.name for lever in KEPT}
    assert kept == {name: manifest.training[name] for name in kept}
    other = {"tile_tokens": 512}
    assert known_of(_with(manifest, **other)).kept == kept | other


@pytest.mark.parametrize("value", [0, -1, True, "512", 1.5, [], {}, 1 << 80])
@pytest.mark.parametrize("key", ["micro_batch_tokens", "chunk_tokens", "tile_tokens"])
def test_sizes_that_no_run_has_are_refused(manifest: Manifest, key: str, value: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="has an invalid state of the run: "):
        known_of(_with(manifest, **{key: value}))


def test_a_state_of_another_step_is_refused(manifest: Manifest) -> None:
    other = Manifest(step=8, files={}, model="", training=manifest.training)
    with pytest.raises(CheckpointMismatch, match="step 9 of a run in a checkpoint of step 8"):
        known_of(other)


def test_a_checkpoint_of_another_format_is_refused_and_not_passed_over(
    world: Path, tmp_path: Path
) -> None:
    """The one before it would resume: that would lose what another version has done since."""
    config = config_of(world, tmp_path / "run", SETTING)
    run(config, die=7)
    newest = finished(tmp_path / "run" / FOLDER)[0]
    from megatrain.disk.checkpoint.manifest import signed

    fields = json.loads((newest / MANIFEST_NAME).read_text())
    del fields["sha256"]
    fields["schema"] = 2
    (newest / MANIFEST_NAME).write_bytes(signed(json.dumps(fields, indent=1).encode()))
    with pytest.raises(CheckpointMismatch, match=r"has another format \(2; this version"):
        _resumed(tmp_path / "run" / FOLDER, config)


def test_the_same_model_under_another_name_is_resumed(world: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(world / "model-0.0", tmp_path / "copy")
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace("{", '{"_name_or_path": "elsewhere",', 1))
    config = config_of(world, world / "run", SETTING, model={"name_or_path": str(copy)})
    found = _resumed(world / "run" / FOLDER, config)
    assert found is not None
    assert found.changed == [f"model.name_or_path: {world}/model-0.0 -> {copy}"]


@pytest.mark.parametrize("other", ["config", "weights", "missing"])
def test_another_model_is_refused(world: Path, tmp_path: Path, other: str) -> None:
    """Also one of the same shape, and one that is no longer there to compare."""
    copy = tmp_path / "copy"
    if other != "missing":
        shutil.copytree(world / ("model-0.1" if other == "config" else "model-0.0"), copy)
    if other == "weights":
        data = bytearray((copy / "model.safetensors").read_bytes())
        data[-2] ^= 1
        (copy / "model.safetensors").write_bytes(data)
    config = config_of(world, world / "run", SETTING, model={"name_or_path": str(copy)})
    with pytest.raises(CheckpointMismatch, match=r"model\.name_or_path was .* is another model"):
        _resumed(world / "run" / FOLDER, config)


@pytest.mark.merge
def test_a_learning_rate_that_jumps_is_said(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path / "run", SETTING)
    assert run(config, die=7) is None
    with Trainer(config, dry_run=True) as trainer:
        assert not [note for note in trainer.notes if "learning rate" in note]
    longer = config_of(world, tmp_path / "run", SETTING, train={"steps": 20})
    with Trainer(longer, dry_run=True) as trainer:
        (note,) = [note for note in trainer.notes if "learning rate" in note]
    assert re.fullmatch(
        r"the learning rate jumps: step 6 was trained at 0\.00\d+, step 7 will be at 0\.00\d+, "
        "because train or optim settings changed",
        note,
    )
