"""A loss that spans rows: preferences between pairs of answers, with reference log-probabilities.

    -log sigmoid(beta x ((chosen - its reference) - (rejected - its reference)))

where an answer counts with the sum of its tokens' log-probabilities. `plain_pair_loss` is the same
written as one would without the engine: pair by pair, for ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.engine.batch import MicroBatch
from megatrain.errors import BatchError
from megatrain.losses.head import IGNORED
from megatrain.losses.loss import Loss, LossInputs, LossValue

BETA = 0.1


class PairLoss(Loss):
    """A unit is a pair: answers 2n (chosen) and 2n + 1 (rejected) of a micro-batch."""

    extra_names = ("answers", "reference")

    def count(self, inputs: LossInputs) -> int:
        answers, num_answers = inputs.extra["answers"], len(inputs.extra["reference"])
        found = set(answers[inputs.targets != IGNORED].tolist())
        outside = sorted(found - set(range(num_answers)))
        if outside:
            raise BatchError(f"answer {outside[0]} has no reference log-probability")
        for answer in range(num_answers):
            if answer not in found or answer ^ 1 >= num_answers:
                other = answer if answer not in found else answer ^ 1
                raise BatchError(
                    f"pair {answer // 2} has no {('chosen', 'rejected')[other % 2]} answer here; "
                    "both answers must be in one micro-batch"
                )
        return num_answers // 2

    def value(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        reference = inputs.extra["reference"]
        numbers = torch.arange(len(reference), device=logprobs.device)
        belongs = inputs.extra["answers"].view(-1) == numbers[:, None]
        answers = (belongs * logprobs.view(-1)).sum(1)
        chosen, rejected = (answers - reference).view(-1, 2).unbind(1)
        margins = BETA * (chosen - rejected)
        return LossValue(
            total=-F.logsigmoid(margins).sum(), figures={"accuracy": (margins > 0).sum()}
        )


def with_pairs(batch: Sequence[MicroBatch], seed: int = 0) -> list[MicroBatch]:
    """Return `batch` with its documents as answers, in order, and random references.

    A document is a row, or a part of a packed row. The number of them must be even.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_with_pairs(micro, generator) for micro in batch]


def _with_pairs(micro: MicroBatch, generator: torch.Generator) -> MicroBatch:
    rows, length = micro.labels.shape
    places = micro.position_ids
    if places is None:
        places = torch.arange(length).repeat(rows, 1)
    answers = (places.view(-1) == 0).cumsum(0).view(rows, length) - 1
    reference = -100 * torch.rand(int(answers.max()) + 1, generator=generator)
    return replace(micro, extra={"answers": answers, "reference": reference})


def plain_pair_loss(batch: Sequence[MicroBatch]) -> Callable[[Tensor, MicroBatch], Tensor]:
    """Return a micro-batch's part of the loss of `batch`, as a function of log-probabilities."""
    num_pairs = sum(len(micro.extra["reference"]) // 2 for micro in batch)

    def loss(logprobs: Tensor, micro: MicroBatch) -> Tensor:
        answers, reference = micro.extra["answers"], micro.extra["reference"]
        losses = []
        for first in range(0, len(reference), 2):
            chosen, rejected = (
                torch.where(answers == number, logprobs, 0.0).sum() - reference[number]
                for number in (first, first + 1)
            )
            losses.append(-F.logsigmoid(BETA * (chosen - rejected)))
        return torch.stack(losses).sum() / num_pairs

    return loss
