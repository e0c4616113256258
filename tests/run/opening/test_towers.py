"""Runs on rows with pictures: what is trained, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForMultimodalLM

from megatrain.cli.verbs import evaluate_model
from megatrain.errors import ConfigError
from megatrain.run.trainer import Trainer
from testkit.media_runs import media_run_config, write_media_world
from testkit.runs import lines_of, run, unequal

pytestmark = pytest.mark.merge


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    write_media_world(tmp_path)
    return tmp_path


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_a_resumed_run_has_the_bits_of_one_that_ran_through(world: Path) -> None:
    whole = run(media_run_config(world, world / "whole"))
    config = media_run_config(world, world / "run")
    assert run(config, die=3) is None
    assert unequal(run(config, resume=True), whole) == []
    assert lines_of(world / "run") == lines_of(world / "whole")


@pytest.mark.parametrize(
    ("media", "changed"),
    [("auto", ("merger",)), ("frozen", ()), ("all", ("merger", "blocks", "patch_embed"))],
)
def test_a_run_trains_of_towers_what_the_config_says(
    media: str, changed: tuple[str, ...], world: Path
) -> None:
    said = "params of towers and projectors are trained" if changed else "projectors are frozen"
    with Trainer(media_run_config(world, world / "run", model={"media": media})) as trainer:
        assert any(said in note for note in trainer.notes)
        trainer.train()
        trainer.home.export(world / "export")
    before, after = _tensors(world / "model"), _tensors(world / "export")
    assert before.keys() == after.keys()
    visual = [name for name in before if "visual" in name]
    moved = {name for name in visual if not torch.equal(before[name], after[name])}
    assert moved == {name for name in visual if any(part in name for part in changed)}
    AutoModelForMultimodalLM.from_pretrained(world / "export")


def test_adapters_train_beside_frozen_towers(world: Path) -> None:
    changes = {"lora": {"rank": 4}}
    state = run(media_run_config(world, world / "run", **changes))
    assert state is not None
    with (
        pytest.raises(ConfigError, match=r"model.media is all: with adapters"),
        Trainer(media_run_config(world, world / "other", model={"media": "all"}, **changes)),
    ):
        pass


def test_eval_of_rows_with_media_is_the_evaluation_of_a_run(world: Path) -> None:
    said = evaluate_model(world / "model", world / "rows.jsonl", None)
    judged: dict[str, Any] = {
        "data": {"eval": [str(world / "rows.jsonl")]},
        "train": {"steps": 1},
    }
    run(media_run_config(world, world / "run", **judged))
    first = lines_of(world / "run")[0]["eval_loss"]
    assert f"{first:.4f}" in said
