"""Kahneman-Tversky optimization: answers that are each good or bad, without a partner.

    desirable       weight x (1 - sigmoid(beta x (ratio - z)))
    undesirable     weight x (1 - sigmoid(beta x (z - ratio)))

where `ratio` is an answer's log-ratio to the reference and z how far the model has moved from it in
general: the mean log-ratio of unrelated answers, at least 0, through which no gradient goes. A row
is its answer, and the answer of another row to the same prompt. As in TRL, z is of the
micro-batch: its size is part of the recipe, and a resumed run keeps it.

Laws (tests/losses/test_preferences.py, and against TRL's trainer `python -m proofs.preferences`)
    1. The loss is the mean over the rows of a step; unrelated answers have weight 0.
    2. Ranks change nothing: no micro-batch is divided among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.losses.answers import AnswerLoss, answer_pairs
from megatrain.losses.loss import LossInputs, LossValue

_OF_KIND = {"rewards/chosen": "desirable", "rewards/rejected": "undesirable"}
"""Figures that are means over the rows of one kind, and the share of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kto(AnswerLoss):
    """The loss (arXiv 2402.01306). A unit is a row."""

    extra_names: ClassVar[tuple[str, ...]] = ("answers", "lengths", "reference", "desirable")
    of_rows: ClassVar[tuple[str, ...]] = ("desirable",)
    first: ClassVar[str] = "own"
    second: ClassVar[str] = "unrelated"

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        ratios, unrelated = answer_pairs(sums - inputs.extra["reference"])
        drift = unrelated.detach().mean().clamp(min=0)
        desirable = inputs.extra["desirable"]
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        gains = torch.where(desirable, ratios - drift, drift - ratios)
        losses = weights * (1 - torch.sigmoid(self.beta * gains))
        rewards = self.beta * ratios
        figures = {
            "rewards/chosen": rewards.where(desirable, 0.0).sum(),
            "rewards/rejected": rewards.where(~desirable, 0.0).sum(),
            "desirable": desirable.sum(),
            "kl": drift * len(ratios),
        }
        return LossValue(total=losses.sum(), figures=figures, of_units=losses)

    def reported(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return rewards as means over the rows of their kind; without such rows, none."""
        shares = {"desirable": means["desirable"], "undesirable": 1 - means["desirable"]}
        found = {n: means[n] / shares[kind] for n, kind in _OF_KIND.items() if shares[kind] > 0}
        if len(found) == len(_OF_KIND):
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found | {"desirable": means["desirable"], "kl": means["kl"]}
