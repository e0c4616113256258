"""Losses over complete answers: each counts with the sum of its tokens' log-probabilities.

A row of preference data is two documents, and both are in one micro-batch: documents 2n and 2n + 1
are row n. Only two numbers per row enter such a loss, so its gradient with respect to a token is
that of its document.

Laws (tests/losses/test_preferences.py, tests/engine/test_pair_loss.py)
    1. The weights of tokens are the gradients of `value` by ordinary autograd.
    2. A row whose documents are not both there is refused.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.errors import BatchError
from megatrain.losses.head import IGNORED
from megatrain.losses.loss import Loss, LossInputs, LossValue, TokenWeights

_BLOCK_ELEMENTS = 1 << 22
"""Elements of the table (documents, positions) that exist at a time."""


class AnswerLoss(Loss):
    """A unit is a row of two documents. To add one, write `of_answers`."""

    extra_names: ClassVar[tuple[str, ...]] = ("answers", "lengths")
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

    def count(self, inputs: LossInputs) -> int:
        answers, lengths = inputs.extra["answers"], inputs.extra["lengths"]
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
        for name in sorted(set(self.extra_names) - {"answers", "lengths"}):
            expected = num_answers // 2 if name in self.of_rows else num_answers
            if inputs.extra[name].shape != (expected,):
                shape = tuple(inputs.extra[name].shape)
                raise BatchError(f"{name!r} is {shape}, and there are {expected} to describe")
        return num_answers // 2

    def value(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        return self.of_answers(inputs, answer_sums(inputs, logprobs))

    def unit_places(self, inputs: LossInputs) -> Tensor:
        answers = inputs.extra["answers"].reshape(-1)
        places = answers.new_zeros(len(inputs.extra["lengths"]))
        places[answers] = torch.arange(len(answers), device=answers.device)  # any of a document's
        return places[::2]

    def weights(self, inputs: LossInputs, logprobs: Tensor | None, num_units: int) -> TokenWeights:
        assert logprobs is not None
        leaf = answer_sums(inputs, logprobs).detach().requires_grad_()
        with torch.enable_grad():
            value = self.of_answers(inputs, leaf)
            loss = value.total / num_units
        (d_sums,) = torch.autograd.grad(loss, leaf)
        answers = inputs.extra["answers"]
        return TokenWeights(
            weights=d_sums.index_select(0, answers.view(-1)).view(answers.shape),
            loss=loss.detach(),
            figures={name: figure.detach() for name, figure in value.figures.items()},
        )


def answer_sums(inputs: LossInputs, logprobs: Tensor) -> Tensor:
    """Return the sum of the log-probabilities of each document's trained tokens. (documents,)

    The same call gives the same bits on every device: no sum is atomic.
    """
    answers, num_answers = inputs.extra["answers"].view(-1), len(inputs.extra["lengths"])
    flat = logprobs.reshape(-1)
    numbers = torch.arange(num_answers, device=flat.device)
    blocks = torch.split(numbers, max(1, _BLOCK_ELEMENTS // len(flat)))
    return torch.cat([torch.where(answers == n[:, None], flat, 0.0).sum(1) for n in blocks])


def answer_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of first and second documents, row by row."""
    first, second = values.view(-1, 2).unbind(1)
    return first, second
