"""Micro-batches for a loss that spans rows, and that loss without the engine.

    -log sigmoid(beta x ((chosen - its reference) - (rejected - its reference)))

where an answer counts with the sum of its tokens' log-probabilities. `plain_pair_loss` is Dpo
written as one would without the engine: pair by pair, for ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.losses.head import IGNORED
from megatrain.losses.preferences import Dpo

BETA = Dpo().beta


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
    trained = answers[micro.loss_inputs().targets != IGNORED]
    lengths = torch.bincount(trained, minlength=len(reference))
    extra = {"answers": answers, "lengths": lengths, "reference": reference}
    return replace(micro, loss_tensors=extra)


def plain_pair_loss(batch: Sequence[MicroBatch]) -> Callable[[Tensor, MicroBatch], Tensor]:
    """Return a micro-batch's part of the loss of `batch`, as a function of log-probabilities."""
    num_pairs = sum(len(micro.loss_tensors["reference"]) // 2 for micro in batch)

    def loss(logprobs: Tensor, micro: MicroBatch) -> Tensor:
        answers, reference = micro.loss_tensors["answers"], micro.loss_tensors["reference"]
        losses = []
        for first in range(0, len(reference), 2):
            chosen, rejected = (
                torch.where(answers == number, logprobs, 0.0).sum() - reference[number]
                for number in (first, first + 1)
            )
            losses.append(-F.logsigmoid(BETA * (chosen - rejected)))
        return torch.stack(losses).sum() / num_pairs

    return loss
