"""One run of a trainer: as TRL has it, or streamed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Return the trainer of a case; `changes` are arguments of its config, or callbacks."""
    import trl
    from datasets import Dataset, disable_progress_bars

    from megatrain.integrations.trl import streamed

    disable_progress_bars()
    trainer_class = getattr(trl, f"{case.trainer}Trainer")
    callbacks = changes.pop("callbacks", None)
    given: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
    }
    rows = case.rows()
    return (streamed(trainer_class) if is_streamed else trainer_class)(
        model=str(model),
        args=getattr(trl, f"{case.trainer}Config")(**given | case.args | changes),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:12]),
        callbacks=callbacks,
        **case.given,
    )


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
