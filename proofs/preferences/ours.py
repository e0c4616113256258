"""The batches that TRL saw, through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import TensorKind
from megatrain.optim.adamw import AdamW
from megatrain.run.evaluation.references import document_sums
from proofs.preferences.cases import RATE, Case
from proofs.preferences.history import History
from testkit.engines import make_engine


def train_ours(case: Case, model: Path, theirs: History) -> History:
    """Return what the engine does on the same batches, with references from its own start."""
    history, home = History(), load_model(model, dtype="fp32")
    optimizer = AdamW(learning_rate=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    with make_engine(
        home.decoder, home.store, optimizer=optimizer, loss=case.loss, update="late"
    ) as engine:
        batches = theirs.batches
        if "reference" in case.loss.required_tensors:
            batches = [_referenced(engine, batch) for batch in batches]
        for batch in batches:
            history.losses.append(engine.step(batch).loss)
            found = {
                p.name: home.store.param(p.name, TensorKind.GRAD) + 0 for p in home.decoder.params
            }
            history.gradients.append(found)
    return history


def _referenced(engine: Engine, batch: Sequence[MicroBatch]) -> list[MicroBatch]:
    found = zip(batch, engine.logprobs(batch), strict=True)
    sums = [torch.tensor(document_sums(micro, logprobs)) for micro, logprobs in found]
    return [
        replace(micro, loss_tensors={**micro.loss_tensors, "reference": reference})
        for micro, reference in zip(batch, sums, strict=True)
    ]
