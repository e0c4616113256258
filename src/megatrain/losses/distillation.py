"""Distillation: the student learns what a teacher says of each trained token.

The teacher's likeliest tokens and their log-probabilities come beside a micro-batch
(data/steps/teacher.py). Both models are compared over these tokens and one outcome more: all other
tokens together. Joining outcomes never makes a divergence larger, so with some of the vocabulary
the loss is a lower bound, and with all of it the divergence itself.

    forward   KL(teacher, student): the student covers whatever the teacher says
    reverse   KL(student, teacher): the student says only what the teacher would
    jsd       half of each model's KL to the mean of both

Logits of both are divided by the temperature. The loss is not multiplied by its square.

Laws (tests/losses/test_distillation.py; against TRL's GKDTrainer, `python -m proofs.distillation`)
    1. With all of the vocabulary, loss and gradients are those of autograd through all logits.
    2. With less of it the loss is never larger, and 0 where the models agree.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.choices import Divergence
from megatrain.errors import BatchError
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import TokenOutputSpec
from megatrain.losses.loss import Loss, LossInputs, LossValue

TOKENS, LOGPROBS = "teacher_tokens", "teacher_logprobs"
"""Names in `loss_tensors`: the teacher's likeliest tokens, and their log-probabilities at the same
temperature. (rows, length, k)"""
_LEAST_REST = 1e-6
"""Least probability of all other tokens together, in both models: what is left of 1 in fp32 is
rounding below that."""


class Distill(Loss):
    """Divergence between teacher and student, a mean over trained tokens."""

    required_tensors: ClassVar[tuple[str, ...]] = (TOKENS, LOGPROBS)

    def __init__(self, *, temperature: float = 1.0, divergence: Divergence = "forward") -> None:
        self._divergence: Divergence = divergence
        self.output_spec = TokenOutputSpec(tokens=TOKENS, logsumexp=True, temperature=temperature)

    def num_items(self, inputs: LossInputs) -> int:
        shapes = [tuple(inputs.loss_tensors[name].shape) for name in self.required_tensors]
        expected = (*inputs.targets.shape, *shapes[0][2:3])
        if len(expected) != 3 or shapes != [expected, expected]:
            raise BatchError(
                f"{TOKENS} is {shapes[0]} and {LOGPROBS} {shapes[1]}; both must be (rows, length, "
                f"k), and input_ids are {tuple(inputs.targets.shape)}"
            )
        return int((inputs.targets != IGNORED).sum())

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        leaves, trained = inputs.outputs, inputs.targets != IGNORED
        assert leaves is not None
        assert leaves.logits is not None
        assert leaves.logsumexp is not None
        student = _with_rest(leaves.logits - leaves.logsumexp[..., None], trained)
        teacher = _with_rest(inputs.loss_tensors[LOGPROBS], trained)
        losses = self._apart(teacher, student).where(trained, 0.0)
        return LossValue(loss_sum=losses.sum(), per_item=losses[trained])

    def item_positions(self, inputs: LossInputs) -> Tensor:
        return (inputs.targets.reshape(-1) != IGNORED).nonzero().view(-1)

    def _apart(self, teacher: Tensor, student: Tensor) -> Tensor:
        """Return how far log-probabilities are apart. (rows, length)"""
        if self._divergence == "forward":
            return _kl(teacher, student)
        if self._divergence == "reverse":
            return _kl(student, teacher)
        mean = torch.logaddexp(teacher, student) - math.log(2)
        return (_kl(teacher, mean) + _kl(student, mean)) / 2


def _kl(of: Tensor, to: Tensor) -> Tensor:
    return (of.exp() * (of - to)).sum(-1)


def _with_rest(logprobs: Tensor, trained: Tensor) -> Tensor:
    """Return log-probabilities of some tokens with that of all others. (rows, length, k + 1)

    Where nothing is trained, any that have a finite gradient.
    """
    unused = -math.log(logprobs.shape[-1] + 1)
    logprobs = logprobs.where(trained[..., None], unused)
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat([logprobs, rest.log()], -1)
