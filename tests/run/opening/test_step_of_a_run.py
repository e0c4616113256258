"""The step that a run leaves to the plan: by its data, written down, and kept by a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import load_config
from megatrain.data.training_rows import TrainingRows
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import CheckpointMismatch, Interrupted
from megatrain.planning.step_size import LEAST_STEPS, StepSize
from megatrain.run.folder import FOLDER
from megatrain.run.opening import planned
from megatrain.run.opening.training_data import TrainingData
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, differences, run

pytestmark = pytest.mark.usefixtures("cache_in_world")
OPEN: dict[str, Any] = {"batch_tokens": "auto", "micro_batch_tokens": "auto"}
ALIKE = Setting(micro_batches=False, save_every=2)


def machine_for(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """From now on, another machine."""
    size = StepSize(tokens=tokens, reason=f"good with {tokens}")

    def sized(config: Any, *_: Any) -> StepSize | None:
        return size if config.train.batch_tokens == "auto" else None

    monkeypatch.setattr(planned, "step_size_of", sized)


@pytest.mark.merge
def test_a_resumed_run_keeps_its_step_on_another_machine(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config_of(world, tmp_path / "given", ALIKE, train=OPEN | {"batch_tokens": 128})
    state = run(given)
    assert state is not None
    machine_for(monkeypatch, 128)
    config = config_of(world, tmp_path / "open", ALIKE, train=OPEN)
    with pytest.raises(Interrupted):
        run(config, stop=4)
    machine_for(monkeypatch, 256)
    ended = run(config, resume=True)
    assert differences(world, ended, tmp_path / "open", (state, tmp_path / "given")) == []
    plan = json.loads((tmp_path / "open" / "plan.json").read_text())
    assert plan["reasons"]["batch_tokens"] == "unchanged since the start of the run"
    newest = read_manifest(finished(tmp_path / "open" / FOLDER)[0])
    assert newest.training["config"]["train"]["batch_tokens"] == 128
    assert load_config(tmp_path / "open" / "config.yaml").train.batch_tokens == 128


def test_a_run_by_rows_does_not_become_one_by_tokens(world: Path, tmp_path: Path) -> None:
    by_rows = {"batch_tokens": None, "batch_rows": 8}
    assert run(config_of(world, tmp_path / "run", ALIKE, train=by_rows), die=5) is None
    config = config_of(world, tmp_path / "run", ALIKE, train=OPEN)
    with pytest.raises(CheckpointMismatch, match=r"train\.batch_rows: 8 -> null"):
        run(config, resume=True)


def test_the_data_of_a_run_bound_its_step(world: Path, tmp_path: Path) -> None:
    rows = (world / "rows.jsonl").read_text()
    tokens = []
    for times in (1, 40):
        path = tmp_path / f"{times}.jsonl"
        path.write_text(rows * times)
        data = {"train": str(path), "eval": None}
        config = config_of(world, tmp_path / f"run {times}", ALIKE, data=data, train=OPEN)
        with Trainer(config, dry_run=True) as trainer:
            assert isinstance(trainer.data, TrainingData)
            assert isinstance(trainer.data.rows, TrainingRows)
            assert trainer.data.rows.epoch_tokens == int(trainer.data.rows.train.lengths.sum())
            size = trainer.plan.workload.step_tokens
            assert trainer.data.steps_in_epoch >= LEAST_STEPS or size == 64
        tokens.append(size)
    assert tokens[0] < tokens[1]
