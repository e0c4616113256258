"""The same rows through MegaTrain's trainer on the CPU, in fp32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.batch import MicroBatch
from megatrain.config import Config
from megatrain.engine.engine import Engine, RankInfoFn
from megatrain.engine.results import StepResult
from megatrain.run.trainer import Trainer
from proofs.parity.cases import Case, resolved
from proofs.parity.steps import History, documents_of


def train_ours(case: Case, model: Path, files: list[Path], scratch: Path) -> History:
    """Return what the trainer trained on, step by step."""
    history = History()
    with Trainer(_config(case, model, files, scratch)) as trainer:
        history.planned_steps = trainer.num_steps
        _record(trainer.engine, history)
        trainer.train()
        log = (trainer.folder.path / "metrics.jsonl").read_text().splitlines()
    # TRL logs the sum of both; ours stand beside each other.
    coefficient = case.ours.get("train.router_aux_loss", 0.0)
    history.losses = [
        line["loss"] + coefficient * line.get("aux_loss", 0.0)
        for line in map(json.loads, log)
        if "loss" in line
    ]
    return history


def _record(engine: Engine, history: History) -> None:
    """Note each step's micro-batches as the engine gets them."""
    step = engine.step

    def recorded(batch: Sequence[MicroBatch], says: RankInfoFn | None = None) -> StepResult:
        inputs = [{**micro.inputs, "labels": micro.labels} for micro in batch]
        history.documents.append([found for micro in inputs for found in documents_of(micro)])
        return step(batch, says)

    engine.step = recorded  # type: ignore[method-assign]


def _config(case: Case, model: Path, files: list[Path], scratch: Path) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"name_or_path": str(model)},
        "data": {"train": [str(file) for file in files]},
        "optim": {"betas": [0.9, 0.95], "weight_decay": 0.0},
        "memory": {"device": "cpu"},
        "eval": {"samples": 0},
        "save": {"dir": str(scratch / "ours"), "every": None},
    }
    for key, value in {**case.shared_by_ours(), **case.ours}.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = resolved(value)
    return Config.model_validate(sections)
