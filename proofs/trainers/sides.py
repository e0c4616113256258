"""One run of a trainer: as TRL has it, or streamed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from proofs.side_by_side import quiet_arguments
from proofs.trainers.cases import Case

STEPS = 20
RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a run logged of each step, and evaluated at its end."""

    logs: list[dict[str, float]]
    evaluated: dict[str, float]

    def of(self, name: str) -> list[float]:
        return [line[name] for line in self.logs]


def make_trainer(
    case: Case, model: Path, output: Path, *, is_streamed: bool, **changes: Any
) -> Any:
    """Return the trainer of a case; `changes` are arguments, callbacks, lora or settings."""
    import transformers
    import trl
    from datasets import Dataset, disable_progress_bars

    from megatrain.integrations.trl import streamed

    disable_progress_bars()
    trainer_class = getattr(trl if case.trainer else transformers, f"{case.trainer}Trainer")
    config_class = getattr(trl, f"{case.trainer}Config", transformers.TrainingArguments)
    callbacks = changes.pop("callbacks", None)
    ours = {name: changes.pop(name, None) for name in ("lora", "settings")}
    given: dict[str, Any] = {
        **quiet_arguments(output),
        "max_steps": STEPS,
        "learning_rate": RATE,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
    }
    rows = case.rows()
    in_memory = None if is_streamed or case.trainer else _loaded(model)
    return (streamed(trainer_class, **ours) if is_streamed else trainer_class)(
        model=in_memory or str(model),
        args=config_class(**given | case.args | changes),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:12]),
        callbacks=callbacks,
        **case.given,
    )


def _loaded(model: Path) -> Any:
    """Return the model in memory: transformers' own trainer does not load one."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def run(trainer: Any, folder: str | None = None) -> History:
    """Train, evaluate, save into a folder if one is given, and return what was logged."""
    trainer.train()
    evaluated = trainer.evaluate()
    if folder is not None:
        trainer.save_model(folder)
    logs = [line for line in trainer.state.log_history if "loss" in line]
    if hasattr(trainer, "close"):
        trainer.close()
    return History(logs=logs, evaluated=evaluated)
