"""A config of another tool, brought over and run: as many steps and rows as there."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatrain.cli.starting import init_config
from megatrain.config import load_config
from megatrain.run.trainer import Trainer


def test_a_file_of_trl_is_run_with_its_rows_and_steps(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(world / "cache"))
    theirs = {
        "model_name_or_path": str(world / "model-0.0"), "dataset_name": str(world / "rows.jsonl"),
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2,
        "max_length": 64, "assistant_only_loss": True, "learning_rate": 1e-3, "use_cpu": True,
        "output_dir": str(tmp_path / "run"), "save_strategy": "no",
    }  # fmt: skip
    (tmp_path / "sft.json").write_text(json.dumps(theirs))
    init_config(tmp_path / "run.yaml", tmp_path / "sft.json", tool="trl")
    config = load_config(tmp_path / "run.yaml", ["eval.samples=0"])
    with Trainer(config) as trainer:
        assert trainer.num_steps == 2 * math.ceil(60 / 8)
        trainer.train()
        assert trainer.state.step == trainer.num_steps
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if "loss" in json.loads(line)]
    assert [step["learning_rate"] for step in steps[:2]] == pytest.approx([1e-3, 1e-3 * 15 / 16])
