"""Runs over a base in a narrow form: resumed, exported, merged; the form stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli.exporting import export_model
from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import CheckpointMismatch, ConfigError, Interrupted
from megatrain.memory.kinds import TensorKind
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, run, state_of, unequal

pytestmark = pytest.mark.usefixtures("cache_in_world")

LORA: dict[str, Any] = {"rank": 4, "alpha": 6, "dropout": 0.1}
SETTING = Setting(dtype="bf16", save_every=2, keep=9, eval_every=None)


def _config(world: Path, path: Path, base: str) -> Any:
    config = config_of(world, path, SETTING, lora=LORA)
    return config.model_copy(update={"model": config.model.model_copy(update={"base": base})})


@pytest.mark.merge
def test_a_resumed_run_ends_in_the_bits_of_one_that_was_not(world: Path, tmp_path: Path) -> None:
    with Trainer(_config(world, tmp_path / "whole", "nf4")) as trainer:
        trainer.train()
        trainer.save_model(tmp_path / "whole" / "model")
        whole = state_of(trainer)
        assert any("are kept in nf4" in note for note in trainer.notes)
        weights = {
            param.name: trainer.home.store.weight(param.name).clone()
            for param in trainer.home.decoder.params
            if not param.is_adapter
        }
    with pytest.raises(Interrupted):
        run(_config(world, tmp_path / "stopped", "nf4"), stop=3)
    with pytest.raises(CheckpointMismatch, match=r"model\.base: nf4 -> bf16"):
        Trainer(_config(world, tmp_path / "stopped", "bf16"))
    with Trainer(_config(world, tmp_path / "stopped", "nf4")) as trainer:
        trainer.train(resume_from_checkpoint=True)
        assert unequal(whole, state_of(trainer)) == []
    adapters = read_model_folder(tmp_path / "whole" / "model")
    assert adapters.base == "nf4"
    export_model(tmp_path / "whole", tmp_path / "merged", merge=True)
    merged = read_model_folder(tmp_path / "merged").load((TensorKind.HI,))
    unlike = [n for n, w in weights.items() if not torch.equal(merged.store.weight(n), w)]
    assert set(unlike) == {f"{module}.weight" for module in _adapted(adapters)}


def _adapted(adapters: Any) -> tuple[str, ...]:
    found: tuple[str, ...] = adapters.decoder.adapters.modules
    return found


def test_weights_that_are_trained_are_kept_in_full(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.base is nf4 and there are no adapters"):
        config_of(world, tmp_path, SETTING, model={"name_or_path": str(world), "base": "nf4"})
