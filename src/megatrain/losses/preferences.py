"""Losses over complete answers: each counts with the sum of its tokens' log-probabilities.

A row of preference data is two documents, and both are in one micro-batch: documents 2n and 2n + 1
are row n. Only two numbers per row enter such a loss, so its gradient with respect to a token is
that of its document.

    Dpo     -log sigmoid(beta x (chosen - rejected)) of log-ratios to the reference
    Ipo     (chosen - rejected - 1 / (2 beta))^2 of mean log-ratios per token
    Orpo    the chosen answer's mean loss per token, and the log of the odds ratio
    Simpo   -log sigmoid(beta x (chosen - rejected) - gamma) of mean log-probabilities per token
    ApoZero 1 - sigmoid(beta x chosen) + sigmoid(beta x rejected) of log-ratios to the reference
    Robust  Dpo whose pairs are the wrong way round with a probability, without its bias
    Kto     weight x (1 - sigmoid(beta x (ratio - z))) of an answer that is desirable,
            weight x (1 - sigmoid(beta x (z - ratio))) of one that is not

Dpo, Ipo, ApoZero, Robust and Kto need the log-probability of every answer under the reference
model, which is that at the start of training. Orpo and Simpo need none. `sft` adds the chosen
answer's mean loss per token, with a weight, to those that do not have it (RPO, arXiv 2404.19733).

Answers of Kto are each good or bad, without a partner. `ratio` is an answer's log-ratio to the
reference and z how far the model has moved from it in general: the mean log-ratio of unrelated
answers, at least 0, through which no gradient goes. A row is its answer, and the answer of another
row to the same prompt. As in TRL, z is of the micro-batch: its size is part of the recipe, and a
resumed run keeps it.

Laws (tests/losses/test_preferences.py, and against TRL's trainers `python -m proofs.preferences`)
    1. Each is the published formula: a mean over the rows of a step, however they are cut into
       micro-batches; unrelated answers have weight 0.
    2. The weights of tokens are the gradients of `compute_loss` by ordinary autograd.
    3. A row whose documents are not both there is refused.
    4. At a reference that is the model itself, Dpo is log 2 and its reward is 0.
    5. Ranks change nothing: no micro-batch is divided among them.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.errors import BatchError
from megatrain.losses.head import IGNORED
from megatrain.losses.loss import LogprobGrads, Loss, LossInputs, LossValue

_BLOCK_ELEMENTS = 1 << 22
"""Elements of the table (documents, positions) that exist at a time."""
WITH_REFERENCE = ("answers", "lengths", "reference")
_OF_KIND = {"rewards/chosen": "desirable", "rewards/rejected": "undesirable"}
"""Figures that are means over the rows of one kind, and the share of these."""


class AnswerLoss(Loss):
    """A unit is a row of two documents. To add one, write `of_answers`."""

    required_tensors: ClassVar[tuple[str, ...]] = ("answers", "lengths")
    """`answers` (rows, length): the document of each position; `lengths` (documents,): the trained
    tokens of each. With `reference` (documents,): its log-probability under another model."""
    of_rows: ClassVar[tuple[str, ...]] = ()
    """Those that have one value for each row, not for each document."""
    first: ClassVar[str] = "chosen"
    second: ClassVar[str] = "rejected"
    """Names of the two documents of a row."""

    @abc.abstractmethod
    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        """Return the loss, differentiable with respect to `sums` (documents,)."""

    def num_items(self, inputs: LossInputs) -> int:
        answers, lengths = inputs.loss_tensors["answers"], inputs.loss_tensors["lengths"]
        found = answers[inputs.targets != IGNORED]
        num_answers = len(lengths)
        outside = found[(found < 0) | (found >= num_answers)]
        if len(outside):
            raise BatchError(
                f"answer {int(outside[0])} is not among the {num_answers} of the micro-batch"
            )
        trained = torch.bincount(found, minlength=num_answers + num_answers % 2)
        missing = (trained == 0).nonzero().view(-1).tolist()
        if missing:
            name = (self.first, self.second)[missing[0] % 2]
            raise BatchError(
                f"row {missing[0] // 2} has no {name} answer here; both of its answers must be in "
                "one micro-batch"
            )
        wrong = (trained != lengths).nonzero().view(-1).tolist()
        if wrong:
            raise BatchError(
                f"answer {wrong[0]} has {int(trained[wrong[0]])} trained tokens, and its length is "
                f"{int(lengths[wrong[0]])}"
            )
        for name in sorted(set(self.required_tensors) - {"answers", "lengths"}):
            expected = num_answers // 2 if name in self.of_rows else num_answers
            if inputs.loss_tensors[name].shape != (expected,):
                shape = tuple(inputs.loss_tensors[name].shape)
                raise BatchError(f"{name!r} is {shape}, and there are {expected} to describe")
        return num_answers // 2

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        return self.of_answers(inputs, answer_sums(inputs, logprobs))

    def item_positions(self, inputs: LossInputs) -> Tensor:
        answers = inputs.loss_tensors["answers"].reshape(-1)
        places = answers.new_zeros(len(inputs.loss_tensors["lengths"]))
        places[answers] = torch.arange(len(answers), device=answers.device)  # any of a document's
        return places[::2]

    def logprob_grads(
        self, inputs: LossInputs, logprobs: Tensor | None, num_items: int
    ) -> LogprobGrads:
        assert logprobs is not None
        leaf = answer_sums(inputs, logprobs).detach().requires_grad_()
        with torch.enable_grad():
            value = self.of_answers(inputs, leaf)
            loss = value.loss_sum / num_items
        (d_sums,) = torch.autograd.grad(loss, leaf)
        answers = inputs.loss_tensors["answers"]
        return LogprobGrads(
            logprob_grads=d_sums.index_select(0, answers.view(-1)).view(answers.shape),
            loss=loss.detach(),
            metrics={name: figure.detach() for name, figure in value.metrics.items()},
        )


def answer_sums(inputs: LossInputs, logprobs: Tensor) -> Tensor:
    """Return the sum of the log-probabilities of each document's trained tokens. (documents,)

    The same call gives the same bits on every device: no sum is atomic.
    """
    answers, num_answers = (
        inputs.loss_tensors["answers"].view(-1),
        len(inputs.loss_tensors["lengths"]),
    )
    flat = logprobs.reshape(-1)
    numbers = torch.arange(num_answers, device=flat.device)
    blocks = torch.split(numbers, max(1, _BLOCK_ELEMENTS // len(flat)))
    return torch.cat([torch.where(answers == n[:, None], flat, 0.0).sum(1) for n in blocks])


def answer_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of first and second documents, row by row."""
    first, second = values.view(-1, 2).unbind(1)
    return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo(AnswerLoss):
    """Direct preference optimization (arXiv 2305.18290)."""

    required_tensors: ClassVar[tuple[str, ...]] = WITH_REFERENCE

    beta: float = 0.1
    label_smoothing: float = 0.0
    """Probability that a pair is the wrong way round."""
    sft: float = 0.0
    """Weight of the chosen answer's own loss."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        ratios = sums - inputs.loss_tensors["reference"]
        return _with_sft(self._of_ratios(ratios), self.beta * ratios, inputs, sums, self.sft)

    def _of_ratios(self, ratios: Tensor) -> Tensor:
        """Return the loss of each pair."""
        chosen, rejected = answer_pairs(ratios)
        return _smoothed(self.beta * (chosen - rejected), self.label_smoothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust(Dpo):
    """Dpo for labels of which some are wrong (arXiv 2403.00409): its expectation has no bias."""

    label_smoothing: float = 0.1

    def _of_ratios(self, ratios: Tensor) -> Tensor:
        chosen, rejected = answer_pairs(ratios)
        margins, wrong = self.beta * (chosen - rejected), self.label_smoothing
        found = -F.logsigmoid(margins) * (1 - wrong) + F.logsigmoid(-margins) * wrong
        return found / (1 - 2 * wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApoZero(AnswerLoss):
    """Anchored preference optimization (arXiv 2408.06266): chosen up, rejected down."""

    required_tensors: ClassVar[tuple[str, ...]] = WITH_REFERENCE

    beta: float = 0.1
    sft: float = 0.0
    """Weight of the chosen answer's own loss."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        rewards = self.beta * (sums - inputs.loss_tensors["reference"])
        chosen, rejected = answer_pairs(rewards)
        losses = 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)
        return _with_sft(losses, rewards, inputs, sums, self.sft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipo(AnswerLoss):
    """Identity preference optimization (arXiv 2310.12036), by the mean over an answer's tokens."""

    required_tensors: ClassVar[tuple[str, ...]] = WITH_REFERENCE

    beta: float = 0.1
    sft: float = 0.0
    """Weight of the chosen answer's own loss."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        ratios = sums - inputs.loss_tensors["reference"]
        chosen, rejected = answer_pairs(ratios / inputs.loss_tensors["lengths"])
        losses = (chosen - rejected - 1 / (2 * self.beta)).square()
        return _with_sft(losses, self.beta * ratios, inputs, sums, self.sft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orpo(AnswerLoss):
    """Odds ratio preference optimization (arXiv 2403.07691)."""

    beta: float = 0.1
    """Share of the odds ratio; the paper calls it lambda."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        means = sums / inputs.loss_tensors["lengths"]
        chosen, rejected = answer_pairs(means)
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        ratios = F.logsigmoid(log_odds)
        figures = {"nll_loss": -chosen.sum(), "log_odds_ratio": ratios.sum()}
        gains = chosen + self.beta * ratios
        return LossValue(
            loss_sum=-gains.sum(),
            metrics={**_figures(self.beta * means, sums), **figures},
            per_item=-gains,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Simpo(AnswerLoss):
    """Simple preference optimization (arXiv 2405.14734)."""

    beta: float = 2.0
    gamma: float = 1.0
    """Margin by which a chosen answer's reward is to be larger."""
    label_smoothing: float = 0.0
    """Probability that a label is wrong, as in Dpo."""
    sft: float = 0.0
    """Weight of the chosen answer's own loss."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        rewards = self.beta * (sums / inputs.loss_tensors["lengths"])
        chosen, rejected = answer_pairs(rewards)
        losses = _smoothed(chosen - rejected - self.gamma, self.label_smoothing)
        return _with_sft(losses, rewards, inputs, sums, self.sft)


def _with_sft(
    losses: Tensor, rewards: Tensor, inputs: LossInputs, sums: Tensor, sft: float
) -> LossValue:
    """Return the loss of pairs, with that of the chosen answers as fine-tuning has it."""
    figures = dict(_figures(rewards, sums))
    if sft:
        nll = -answer_pairs(sums / inputs.loss_tensors["lengths"])[0]
        losses = losses + sft * nll
        figures["nll_loss"] = nll.sum()
    return LossValue(loss_sum=losses.sum(), metrics=figures, per_item=losses)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kto(AnswerLoss):
    """The loss (arXiv 2402.01306). A unit is a row."""

    required_tensors: ClassVar[tuple[str, ...]] = ("answers", "lengths", "reference", "desirable")
    of_rows: ClassVar[tuple[str, ...]] = ("desirable",)
    first: ClassVar[str] = "own"
    second: ClassVar[str] = "unrelated"

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        ratios, unrelated = answer_pairs(sums - inputs.loss_tensors["reference"])
        drift = unrelated.detach().mean().clamp(min=0)
        desirable = inputs.loss_tensors["desirable"]
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
        return LossValue(loss_sum=losses.sum(), metrics=figures, per_item=losses)

    def reported(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return rewards as means over the rows of their kind; without such rows, none."""
        shares = {"desirable": means["desirable"], "undesirable": 1 - means["desirable"]}
        found = {n: means[n] / shares[kind] for n, kind in _OF_KIND.items() if shares[kind] > 0}
        if len(found) == len(_OF_KIND):
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found | {"desirable": means["desirable"], "kl": means["kl"]}
