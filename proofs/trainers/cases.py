"""The trainers that are compared, with their rows and arguments, and the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatrain.cli.demo import byte_tokenizer
from testkit.families import save_tiny

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trainer with rows and arguments."""

    trainer: str
    rows: Callable[[], list[Row]]
    args: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"


def sums() -> list[Row]:
    """Return sums with their results."""
    return [
        {"prompt": f"{a} + {b} = ", "completion": f"{a + b}."} for a in range(20) for b in range(12)
    ]


def texts() -> list[Row]:
    """Return rows of one text."""
    return [{"text": row["prompt"] + row["completion"]} for row in sums()]


def pairs() -> list[Row]:
    """Return sums with a right and a wrong result."""
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": f"{number % 7} or so"}
        for number, row in enumerate(sums())
    ]


def judged() -> list[Row]:
    """Return results that are right or wrong."""
    return [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in pairs()
        for kind in ("chosen", "rejected")
    ]


CASES = {
    "sft": Case(trainer="SFT", rows=sums, args={"weight_decay": 0.1, "max_grad_norm": 1.0}),
    "sft, packed": Case(
        trainer="SFT",
        rows=texts,
        args={"packing": True, "max_length": 64, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    ),
    "sft, gpt2, dft": Case(trainer="SFT", rows=sums, args={"loss_type": "dft"}, family="gpt2"),
    "dpo": Case(trainer="DPO", rows=pairs),
    "dpo, references ahead": Case(
        trainer="DPO",
        rows=pairs,
        args={"precompute_ref_log_probs": True, "loss_type": ["ipo"], "beta": 0.3},
    ),
    "kto": Case(trainer="KTO", rows=judged, args={"per_device_train_batch_size": 4}),
}


def write_model(folder: Path, family: str) -> None:
    """Write a tiny random model in fp32 without dropout, with a tokenizer of bytes."""
    torch.manual_seed(0)
    save_tiny(folder, family)
    byte_tokenizer().save_pretrained(folder)
