"""The rows of a case through TRL's SFTTrainer on the CPU, in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from proofs.parity.cases import Case
from proofs.parity.steps import IGNORED, History, documents_of
from proofs.side_by_side import quiet_arguments


def train_theirs(case: Case, model: Path, files: list[Path], scratch: Path) -> History:
    """Return what SFTTrainer trained on, step by step."""
    from datasets import Dataset, concatenate_datasets, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    history = History()

    class Recorded(SFTTrainer):  # type: ignore[misc]
        """Notes each micro-batch as the model gets it."""

        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            step = self.state.global_step
            history.documents += [[] for _ in range(step + 1 - len(history.documents))]
            history.documents[step] += documents_of(inputs)
            return super().compute_loss(model, inputs, *more, **named)

    rows = [
        Dataset.from_list([json.loads(line) for line in file.read_text().splitlines()])
        for file in files
    ]
    own = {"train_sampling_strategy": "sequential", "adam_beta2": 0.95}
    shared = quiet_arguments(scratch / "theirs") | own | case.shared_by_trl()
    args = SFTConfig(**{**shared, **case.theirs})
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=args,
        train_dataset=concatenate_datasets(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    if case.untrained_after is not None:
        end = trainer.processing_class.convert_tokens_to_ids(case.untrained_after)
        trainer.data_collator = _without_what_follows(end, trainer.data_collator, history)
    trainer.train()
    history.losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    history.planned_steps = trainer.state.max_steps
    return history


def _without_what_follows(
    end: int, collate: Callable[[Any], dict[str, Any]], history: History
) -> Callable[[Any], dict[str, Any]]:
    """Return a collator whose labels leave out the one token after each end of a turn."""

    def changed(examples: Any) -> dict[str, Any]:
        batch = collate(examples)
        after = torch.zeros_like(batch["labels"], dtype=torch.bool)
        after[:, 1:] = batch["input_ids"][:, :-1] == end
        history.left_out += int((after & (batch["labels"] != IGNORED)).sum())
        batch["labels"][after] = IGNORED
        return batch

    return changed
