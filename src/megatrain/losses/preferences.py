"""Losses over pairs of answers, one of which people prefer.

    Dpo     -log sigmoid(beta x (chosen - rejected)) of log-ratios to the reference
    Ipo     (chosen - rejected - 1 / (2 beta))^2 of mean log-ratios per token
    Orpo    the chosen answer's mean loss per token, and the log of the odds ratio
    Simpo   -log sigmoid(beta x (chosen - rejected) - gamma) of mean log-probabilities per token

Dpo and Ipo need the log-probability of every answer under the reference model, which is that at the
start of training. Orpo and Simpo need none.

Laws (tests/losses/test_preferences.py, and against TRL's trainers `python -m proofs.preferences`)
    1. Each is the published formula: a mean over the pairs of a step, however they are cut into
       micro-batches.
    2. At a reference that is the model itself, Dpo is log 2 and its reward is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.losses.answers import AnswerLoss, answer_pairs
from megatrain.losses.loss import LossInputs, LossValue

WITH_REFERENCE = ("answers", "lengths", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo(AnswerLoss):
    """Direct preference optimization (arXiv 2305.18290)."""

    extra_names: ClassVar[tuple[str, ...]] = WITH_REFERENCE

    beta: float = 0.1
    label_smoothing: float = 0.0
    """Probability that a pair is the wrong way round."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        ratios = sums - inputs.extra["reference"]
        chosen, rejected = answer_pairs(ratios)
        losses = _smoothed(self.beta * (chosen - rejected), self.label_smoothing)
        figures = _figures(self.beta * ratios, sums)
        return LossValue(total=losses.sum(), figures=figures, of_units=losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipo(AnswerLoss):
    """Identity preference optimization (arXiv 2310.12036), by the mean over an answer's tokens."""

    extra_names: ClassVar[tuple[str, ...]] = WITH_REFERENCE

    beta: float = 0.1

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        ratios = sums - inputs.extra["reference"]
        chosen, rejected = answer_pairs(ratios / inputs.extra["lengths"])
        losses = (chosen - rejected - 1 / (2 * self.beta)).square()
        figures = _figures(self.beta * ratios, sums)
        return LossValue(total=losses.sum(), figures=figures, of_units=losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orpo(AnswerLoss):
    """Odds ratio preference optimization (arXiv 2403.07691)."""

    beta: float = 0.1
    """Share of the odds ratio; the paper calls it lambda."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        means = sums / inputs.extra["lengths"]
        chosen, rejected = answer_pairs(means)
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        ratios = F.logsigmoid(log_odds)
        figures = {"nll_loss": -chosen.sum(), "log_odds_ratio": ratios.sum()}
        gains = chosen + self.beta * ratios
        return LossValue(
            total=-gains.sum(),
            figures={**_figures(self.beta * means, sums), **figures},
            of_units=-gains,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simpo(AnswerLoss):
    """Simple preference optimization (arXiv 2405.14734)."""

    beta: float = 2.0
    gamma: float = 1.0
    """Margin by which a chosen answer's reward is to be larger."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, as in Dpo."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        rewards = self.beta * (sums / inputs.extra["lengths"])
        chosen, rejected = answer_pairs(rewards)
        losses = _smoothed(chosen - rejected - self.gamma, self.label_smoothing)
        return LossValue(total=losses.sum(), figures=_figures(rewards, sums), of_units=losses)


def _smoothed(margins: Tensor, smoothing: float) -> Tensor:
    """Return the losses of pairs of which that share is the wrong way round."""
    return -F.logsigmoid(margins) * (1 - smoothing) - F.logsigmoid(-margins) * smoothing


def _figures(rewards: Tensor, sums: Tensor) -> Mapping[str, Tensor]:
    """Return sums over pairs, by the names that TRL logs them under."""
    (chosen, rejected), (sums_chosen, sums_rejected) = answer_pairs(rewards), answer_pairs(sums)
    return {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margins": (chosen - rejected).sum(),
        "rewards/accuracies": (chosen > rejected).sum(),
        "logps/chosen": sums_chosen.sum(),
        "logps/rejected": sums_rejected.sum(),
    }


def _log1mexp(values: Tensor) -> Tensor:
    """Return log(1 - exp(values)) of negative values, exactly near 0 and far from it."""
    near = values > -math.log(2)
    # Each branch only sees values that it is exact for: the other's gradient is never nan.
    small, large = values.where(near, -1.0), values.where(~near, -1.0)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
