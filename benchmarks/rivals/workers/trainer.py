"""The Trainer of transformers, which another thread runs, so that it waits between steps.

Settings
    optim       of TrainingArguments: adamw_torch_fused, adamw_torch_8bit, adamw_torch_4bit
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.rivals.workers.plain import load
from benchmarks.rivals.workers.serving import Job, Prepared, serve

MANY_STEPS = 100_000
Found = tuple[float, float | None] | BaseException


class Rows:
    """The rows of all steps, one after another, again and again."""

    def __init__(self, job: Job) -> None:
        tokens = np.load(job.tokens, mmap_mode="r")
        self._rows = tokens.reshape(-1, tokens.shape[-1])

    def __len__(self) -> int:
        return MANY_STEPS * len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._rows[number % len(self._rows)].copy())
        return {"input_ids": ids, "labels": ids}


class Ended(Exception):
    """No further step is asked for."""


class Gate(TrainerCallback):  # type: ignore[misc]
    """Lets each step begin when it is asked for."""

    def __init__(self) -> None:
        self.asked: queue.Queue[bool] = queue.Queue()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.asked.get():
            raise Ended


class StepByStep(Trainer):  # type: ignore[misc]
    """A Trainer that says what each step found."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.gate, self.found, self._loss = Gate(), queue.Queue[Found](), 0.0
        super().__init__(*args, callbacks=[self.gate], **named)

    def training_step(self, *args: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **named)
        self._loss += float(loss)
        return loss

    def _maybe_log_save_evaluate(self, loss: Any, norm: Any, *args: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(loss, norm, *args, **named)
        self.found.put((self._loss, None if norm is None else float(norm)))
        self._loss = 0.0


def arguments(job: Job, rows: int) -> TrainingArguments:
    """Return the settings of a Trainer for this job."""
    return TrainingArguments(
        output_dir="unused",
        use_cpu=job.device == "cpu",
        per_device_train_batch_size=rows // job.micro_batches,
        gradient_accumulation_steps=job.micro_batches,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=job.dtype == "bfloat16",
        optim=job.settings.get("optim", "adamw_torch_fused"),
        learning_rate=job.lr,
        weight_decay=job.weight_decay,
        adam_beta1=job.betas[0],
        adam_beta2=job.betas[1],
        adam_epsilon=job.eps,
        max_grad_norm=job.max_grad_norm or 0.0,
        lr_scheduler_type="constant",
        max_steps=MANY_STEPS,
        train_sampling_strategy="sequential",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def prepare(job: Job) -> Prepared:
    assert not job.rates, "this worker has one rate for all steps"
    model = load(job)
    rows = len(np.load(job.tokens, mmap_mode="r")[0])
    trainer = StepByStep(model=model, args=arguments(job, rows), train_dataset=Rows(job))

    def train() -> None:
        try:
            trainer.train()
        except BaseException as error:
            trainer.found.put(error)

    thread = threading.Thread(target=train)
    thread.start()

    def step(_: Sequence[Tensor]) -> tuple[float, float | None]:
        trainer.gate.asked.put(True)
        found = trainer.found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close() -> None:
        trainer.gate.asked.put(False)
        thread.join()

    return Prepared(params=sum(p.numel() for p in model.parameters()), step=step, close=close)


if __name__ == "__main__":
    serve(prepare)
