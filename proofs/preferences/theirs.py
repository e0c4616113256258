"""Preferences through TRL's trainers on the CPU, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from megatrain.batch import MicroBatch
from megatrain.losses.head import IGNORED
from proofs.preferences.cases import RATE, STEPS, Case, made_rows
from proofs.preferences.history import History
from proofs.side_by_side import quiet_arguments


def train_theirs(case: Case, model: Path, scratch: Path) -> History:
    """Return what TRL's trainer did, and the batches it saw."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    history = History()
    trainer_class, config_class = _classes(case)

    class Recorded(trainer_class):  # type: ignore[misc, valid-type]
        """Notes each micro-batch and its loss."""

        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            step = self.state.global_step
            history.batches += [[] for _ in range(step + 1 - len(history.batches))]
            history.losses += [0.0] * (step + 1 - len(history.losses))
            history.batches[step].append(_micro_batch(case, inputs))
            loss = super().compute_loss(model, inputs, *more, **named)
            history.losses[step] += float(loss.detach()) / 2
            return loss

        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            found = super().concatenated_forward(model, batch)
            if case.trainer != "ORPO":
                return found
            return (*found[:4], -found[0].mean(), *found[5:])  # the answer's, without its prompt

    class Gradients(TrainerCallback):  # type: ignore[misc]
        """Notes the gradients of each step."""

        def on_pre_optimizer_step(self, *given: Any, model: Any, **named: Any) -> None:
            found = {name: p.grad + 0 for name, p in model.named_parameters()}
            history.gradients.append(found)

    resident = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    args = config_class(
        **quiet_arguments(scratch / "theirs"),
        max_steps=STEPS,
        per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=2,
        max_length=512,
        max_grad_norm=0.0,
        **case.theirs,
    )
    optimizer = torch.optim.AdamW(
        resident.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    trainer = Recorded(
        model=resident,
        args=args,
        train_dataset=Dataset.from_list(made_rows(case)),
        processing_class=AutoTokenizer.from_pretrained(model),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=[Gradients()],
    )
    trainer.train()
    return history


def _classes(case: Case) -> tuple[Any, Any]:
    import trl
    from trl.experimental import cpo, orpo

    home = {"ORPO": orpo, "CPO": cpo}.get(case.trainer, trl)
    return getattr(home, f"{case.trainer}Trainer"), getattr(home, f"{case.trainer}Config")


def _micro_batch(case: Case, inputs: Mapping[str, Any]) -> MicroBatch:
    """Return TRL's batch with the two documents of each row beside each other."""
    if case.trainer == "DPO":
        marked = torch.where(inputs["completion_mask"] == 1, inputs["input_ids"], IGNORED)
        both = (inputs["input_ids"], inputs["attention_mask"], marked)
        firsts, seconds = zip(*(tensor.chunk(2) for tensor in both), strict=True)
    elif case.trainer == "KTO":
        firsts, seconds = (
            (
                inputs[f"{kind}input_ids"],
                inputs[f"{kind}attention_mask"],
                torch.where(
                    inputs[f"{kind}completion_mask"] == 1, inputs[f"{kind}input_ids"], IGNORED
                ),
            )
            for kind in ("", "KL_")
        )
    else:
        firsts, seconds = (
            tuple(inputs[f"{kind}_{name}"] for name in ("input_ids", "attention_mask", "labels"))
            for kind in ("chosen", "rejected")
        )
    ids, mask, labels = (
        _beside(first, second, fill)
        for first, second, fill in zip(firsts, seconds, (0, 0, IGNORED), strict=True)
    )
    answers = torch.arange(len(ids))[:, None].repeat(1, ids.shape[1])
    extra = {"answers": answers, "lengths": (labels[:, 1:] != IGNORED).sum(1)}
    if case.trainer == "KTO":
        extra["desirable"] = torch.as_tensor(inputs["label"], dtype=torch.bool)
    return MicroBatch(input_ids=ids, labels=labels, attention_mask=mask, loss_tensors=extra)


def _beside(first: Tensor, second: Tensor, fill: int) -> Tensor:
    """Return the rows of both in turn, as wide as the wider, padded on the right."""
    width = max(first.shape[1], second.shape[1])
    wide = [
        torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill)
        for part in (first, second)
    ]
    return torch.stack(wide, dim=1).reshape(-1, width)
