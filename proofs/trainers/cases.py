"""The trainers that are compared, with their rows and arguments, and the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from megatrain.cli.demo import byte_tokenizer
from testkit.families import save_tiny

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trainer with rows and arguments."""

    trainer: str
    """The first part of its name; empty: transformers' own."""
    rows: Callable[[], list[Row]]
    args: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    given: dict[str, Any] = field(default_factory=dict)
    """What the trainer is given beside its arguments."""


def sums() -> list[Row]:
    """Return sums with their results."""
    return [
        {"prompt": f"{a} + {b} = ", "completion": f"{a + b}."} for a in range(20) for b in range(12)
    ]


def texts() -> list[Row]:
    """Return rows of one text."""
    return [{"text": row["prompt"] + row["completion"]} for row in sums()]


def tokens() -> list[Row]:
    """Return the rows as tokens, of which those of the result are trained."""
    tokenizer = byte_tokenizer()
    found = []
    for row in sums():
        prompt, answer = (tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
        found.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return found


def padded(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Return the tokens of some rows, padded on the right."""
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    masked = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in masked], True, fill)
        for name, fill in fills.items()
    }


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


def prompts() -> list[Row]:
    """Return prompts of unequal length."""
    return [{"prompt": row["prompt"]} for row in sums()]


def roll_out(asked: list[str], trainer: Any) -> dict[str, Any]:
    """Return answers that depend on the prompts and on which of their copies it is, alone."""
    prompt_ids = trainer.processing_class(asked)["input_ids"]
    answers = []
    for number, ids in enumerate(prompt_ids):
        draw = torch.Generator().manual_seed(1000 * sum(ids) + number)
        length = int(torch.randint(3, 9, (), generator=draw))
        answers.append(torch.randint(40, 90, (length,), generator=draw).tolist())
    return {"prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": None}


def high_tokens(completions: list[str], **_: Any) -> list[float]:
    """Reward letters late in the alphabet."""
    return [sum(map(ord, text)) / 100.0 for text in completions]


GRPO: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
}

CASES = {
    "transformers": Case(
        trainer="", rows=tokens, args={"weight_decay": 0.1}, given={"data_collator": padded}
    ),
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
    "reward": Case(trainer="Reward", rows=pairs, args={"center_rewards_coefficient": 0.01}),
    "grpo": Case(
        trainer="GRPO",
        rows=prompts,
        args=GRPO | {"temperature": 0.7},
        given={"reward_funcs": high_tokens, "rollout_func": roll_out},
    ),
    "grpo, reference, two iterations": Case(
        trainer="GRPO",
        rows=prompts,
        args=GRPO | {"beta": 0.1, "num_iterations": 2, "loss_type": "grpo", "epsilon_high": 0.28},
        given={"reward_funcs": high_tokens, "rollout_func": roll_out},
    ),
}


def write_model(folder: Path, family: str, *, scores: bool = False) -> None:
    """Write a tiny random model without dropout, with a tokenizer of bytes.

    One that `scores` texts has a head for rewards already: a new one is random in each tool.
    """
    torch.manual_seed(0)
    save_tiny(folder, family)
    if scores:
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
