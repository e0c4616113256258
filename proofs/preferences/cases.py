"""Losses as both tools name them, the rows and the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatrain.losses.preferences import AnswerLoss, Dpo, Ipo, Kto, Orpo, Simpo
from proofs.parity.cases import CHATML
from proofs.parity.models import write_model
from proofs.parity.rows import Rows

STEPS = 10
RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One loss in both tools."""

    trainer: Literal["DPO", "ORPO", "CPO", "KTO"]
    loss: AnswerLoss
    theirs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the trainer's config."""
    rows: int = 2
    """Of a micro-batch; a step has two."""
    difference: str = ""
    """What was changed in TRL, to compare the rest."""


CASES = {
    "dpo": Case(trainer="DPO", loss=Dpo(), theirs={"beta": 0.1}),
    "dpo, beta 0.5": Case(trainer="DPO", loss=Dpo(beta=0.5), theirs={"beta": 0.5}, rows=3),
    # With one pair at a time TRL's `aot` is DPO with smoothed labels; its `sigmoid` has none.
    "dpo, label smoothing": Case(
        trainer="DPO",
        loss=Dpo(beta=0.3, label_smoothing=0.2),
        theirs={"beta": 0.3, "loss_type": ["aot"], "label_smoothing": 0.2},
        rows=1,
    ),
    "ipo": Case(trainer="DPO", loss=Ipo(), theirs={"beta": 0.1, "loss_type": ["ipo"]}),
    "orpo": Case(
        trainer="ORPO",
        loss=Orpo(beta=0.2),
        theirs={"beta": 0.2},
        difference="TRL's loss of the chosen answer counts the prompt too: without it",
    ),
    "simpo": Case(
        trainer="CPO",
        loss=Simpo(beta=2.0, gamma=0.5),
        theirs={"beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0, "loss_type": "simpo"},
    ),
    "simpo, label smoothing": Case(
        trainer="CPO",
        loss=Simpo(beta=2.5, gamma=1.0, label_smoothing=0.1),
        theirs={
            "beta": 2.5,
            "simpo_gamma": 1.0,
            "cpo_alpha": 0.0,
            "loss_type": "simpo",
            "label_smoothing": 0.1,
        },
    ),
    "kto": Case(trainer="KTO", loss=Kto(), theirs={"beta": 0.1}, rows=4),
    "kto, weights": Case(
        trainer="KTO",
        loss=Kto(beta=0.3, desirable_weight=1.0, undesirable_weight=1.4),
        theirs={"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.4},
        rows=4,
    ),
}


def made_rows(case: Case) -> list[dict[str, Any]]:
    """Return the rows of all steps, as TRL wants them."""
    made = Rows(seed=3)
    count = 2 * STEPS * case.rows
    if case.trainer == "KTO":
        return [
            {"prompt": made.words(8), "completion": " " + made.words(), "label": number % 3 != 0}
            for number in range(count)
        ]
    return [
        {"prompt": made.words(8), "chosen": " " + made.words(), "rejected": " " + made.words(20)}
        for _ in range(count)
    ]


def write_case_model(folder: Path) -> None:
    """Write the model that both tools load."""
    texts = [row.words(20) for row in [Rows(seed=5)] for _ in range(400)]
    write_model(folder, "llama", texts, CHATML, "<|im_end|>")
