"""The loss of fine-tuning: the mean negative log-probability of the step's trained tokens.

Its weights are known before the logits: -1 / (trained tokens of the step), so micro-batches of
unequal length add up to what one batch would have given.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from megatrain.losses.head import IGNORED
from megatrain.losses.loss import Loss, LossInputs, LossValue, TokenWeights


class NextToken(Loss):
    """A unit is a trained token."""

    needs_logprobs: ClassVar[bool] = False

    def count(self, inputs: LossInputs) -> int:
        return int((inputs.targets != IGNORED).sum())

    def value(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        of_units = -logprobs[inputs.targets != IGNORED]
        return LossValue(total=-logprobs.sum(), of_units=of_units)

    def unit_places(self, inputs: LossInputs) -> Tensor:
        return (inputs.targets.reshape(-1) != IGNORED).nonzero().view(-1)

    def weights(self, inputs: LossInputs, logprobs: Tensor | None, num_units: int) -> TokenWeights:
        weights = torch.where(inputs.targets != IGNORED, -1.0 / num_units, 0.0)
        return TokenWeights(weights=weights.to(torch.float32))


NEXT_TOKEN = NextToken()
