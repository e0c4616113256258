"""Scaled positions reach training, checkpoints and the export, and stay when a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatrain.config import Config
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import CheckpointMismatch, DataError, Interrupted
from megatrain.run.folder import FOLDER
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, differences, run, write_world

ROPE = {"type": "yarn", "factor": 4.0}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models of 16 positions, and rows that are longer."""
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    for path in folder.glob("model-*/config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 16}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        yield folder


def _config(world: Path, folder: Path, rope: dict[str, Any] | None) -> Config:
    return config_of(world, folder, Setting(eval_every=None), model={"rope": rope})


def test_a_run_names_the_line_that_covers_its_rows(world: Path, tmp_path: Path) -> None:
    words = r"the 16 positions of the model .* `model\.rope: \{type: yarn, factor: 2\.0\}`"
    with pytest.raises(DataError, match=words):
        Trainer(_config(world, tmp_path / "run", None))
    Trainer(_config(world, tmp_path / "run", ROPE), dry_run=True).close()


@pytest.mark.merge
def test_a_run_trains_saves_resumes_and_exports_the_scaling(world: Path, tmp_path: Path) -> None:
    whole = run(_config(world, tmp_path / "whole", ROPE))
    assert whole is not None
    config = _config(world, tmp_path / "stopped", ROPE)
    with pytest.raises(Interrupted):
        run(config, stop=4)
    ended = run(config, resume=True)
    assert differences(world, ended, tmp_path / "stopped", (whole, tmp_path / "whole")) == []
    with Trainer(config) as trainer:
        trainer.save_model(tmp_path / "out")
    (saved, *_) = finished(tmp_path / "stopped" / FOLDER)
    for folder in (saved / "model", tmp_path / "out"):
        read = AutoConfig.from_pretrained(folder)
        assert (read.rope_parameters["rope_type"], read.rope_parameters["factor"]) == ("yarn", 4.0)
        assert read.rope_parameters["original_max_position_embeddings"] == 16
        assert read.max_position_embeddings == 64
    words = r'model\.rope: \{"type": "yarn", "factor": 4\.0\} -> '
    for other in ({**ROPE, "factor": 8.0}, None):
        with pytest.raises(CheckpointMismatch, match=words):
            run(_config(world, tmp_path / "stopped", other), resume=True)


@pytest.mark.merge
def test_scaling_that_training_drops_would_be_noticed(world: Path, tmp_path: Path) -> None:
    whole = run(_config(world, tmp_path / "scaled", ROPE))
    assert whole is not None
    other = run(_config(world, tmp_path / "plain", {"type": "default", "factor": 4.0}))
    assert differences(world, other, tmp_path / "plain", (whole, tmp_path / "scaled")) != []
