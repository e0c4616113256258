"""Losses: functions of the log-probabilities of a micro-batch's targets, and of other leaves.

A loss is a sum over units (trained tokens, pairs of answers), divided by their number in the step.
The head goes back through the logits with one weight per token: the gradient of the loss with
respect to the token's log-probability. Some losses know these weights beforehand, as NextToken
does. The others set `needs_logprobs`: the head then computes all log-probabilities of the
micro-batch first, chunk by chunk, and projects a second time for the gradients. A loss that also
sees entropies, logits or hidden states names them in `output_spec` (leaves.py); they come and go
back in the same two passes.

A unit never crosses micro-batches: `num_items` raises BatchError for one that does. Nothing here
may ask the device for a number; only `num_items` reads values, and it runs on the host.

Laws (tests/losses/test_loss.py, tests/engine/test_pair_loss.py)
    1. A loss written as `compute_loss` has the gradients of ordinary autograd through the resident
       model.
    2. The first pass holds one chunk of logits at a time; the peak is that of the second.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import LOGPROBS_ALONE, TokenOutputs, TokenOutputSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """A micro-batch as a loss sees it, next to the log-probabilities."""

    targets: Tensor
    """The token that each position predicts, -100 where it predicts none. (rows, length)"""
    loss_tensors: Mapping[str, Tensor]
    """The tensors named by `Loss.required_tensors`."""
    outputs: TokenOutputs | None = None
    """The leaves named by `Loss.output_spec`, and log-probabilities; None: nothing else is
    wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossValue:
    """A loss of a micro-batch: sums over its units."""

    loss_sum: Tensor
    """Scalar."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Further scalars to report, by name: how many pairs are ranked right, for instance."""
    per_item: Tensor | None = None
    """The loss of each unit, whose sum is `loss_sum`; None: it is not told apart. (units,)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGrads:
    """The gradient of the step's loss with respect to each log-probability of a micro-batch."""

    logprob_grads: Tensor
    """Weights in fp32; any number where there is no target. (rows, length)"""
    loss: Tensor | None = None
    """Scalar: the micro-batch's part of it. None: the sum of weight x log-probability, which the
    head computes anyway."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Further scalars to report, by name."""
    others: TokenOutputs | None = None
    """Gradients with respect to further leaves, beside the same weights; None: there are none."""


class Loss(abc.ABC):
    """A loss. To add one, write `num_items` and `compute_loss`."""

    needs_logprobs: ClassVar[bool] = True
    """Whether the weights depend on the log-probabilities: then the head projects twice."""
    required_tensors: ClassVar[tuple[str, ...]] = ()
    """The names of the tensors that each micro-batch must bring along, and no others."""
    output_spec: TokenOutputSpec = LOGPROBS_ALONE
    """The leaves that `compute_loss` finds in `inputs.outputs`, beside log-probabilities."""

    @abc.abstractmethod
    def num_items(self, inputs: LossInputs) -> int:
        """Return the number of units in a micro-batch. Its tensors are on the host.

        Raises BatchError if `loss_tensors` is not what the loss needs.
        """

    @abc.abstractmethod
    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        """Return the loss, differentiable with respect to `logprobs` and `inputs.outputs`.

        Log-probabilities and leaves are zero where there is no target. (rows, length)
        """

    def item_positions(self, inputs: LossInputs) -> Tensor | None:
        """Return a position of each of `LossValue.per_item`, over all rows; None: without them."""
        return None

    def reported(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the figures for people, from the means of `LossValue.figures` over all units."""
        return dict(means)

    def logprob_grads(
        self, inputs: LossInputs, logprobs: Tensor | None, num_items: int
    ) -> LogprobGrads:
        """Return the weight of each token in a step of `num_items`.

        `logprobs` is None unless `needs_logprobs`.
        """
        assert logprobs is not None
        leaves = (inputs.outputs or TokenOutputs(logprobs=logprobs)).detached()
        if inputs.outputs is not None:
            inputs = replace(inputs, outputs=leaves)
        with torch.enable_grad():
            value = self.compute_loss(inputs, leaves.logprobs)
            if not isinstance(value, LossValue):
                raise ConfigError(
                    f"{type(self).__name__}.value returned a {type(value).__name__}; it must "
                    "return mt.LossValue(total=...), the sum of the loss over the units that "
                    "`num_items` counts."
                )
            loss = value.loss_sum / num_items
        found = leaves.gradients(loss)
        return LogprobGrads(
            logprob_grads=found.logprobs,
            loss=loss.detach(),
            metrics={name: figure.detach() for name, figure in value.metrics.items()},
            others=None if found.is_plain else found,
        )


class NextToken(Loss):
    """The loss of fine-tuning: mean negative log-probability of the trained tokens of the step.

    A unit is a trained token. The weights are known before the logits, -1 / (trained tokens of the
    step), so micro-batches of unequal length add up to what one batch would have given.
    """

    needs_logprobs: ClassVar[bool] = False

    def num_items(self, inputs: LossInputs) -> int:
        return int((inputs.targets != IGNORED).sum())

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        per_item = -logprobs[inputs.targets != IGNORED]
        return LossValue(loss_sum=-logprobs.sum(), per_item=per_item)

    def item_positions(self, inputs: LossInputs) -> Tensor:
        return (inputs.targets.reshape(-1) != IGNORED).nonzero().view(-1)

    def logprob_grads(
        self, inputs: LossInputs, logprobs: Tensor | None, num_items: int
    ) -> LogprobGrads:
        weights = torch.where(inputs.targets != IGNORED, -1.0 / num_items, 0.0)
        return LogprobGrads(logprob_grads=weights.to(torch.float32))


class SmoothedNextToken(NextToken):
    """The loss of fine-tuning with label smoothing, as torch's cross_entropy has it.

    `label_smoothing` is the share of the mean over the vocabulary of negative log-probabilities.
    Figure: `nll_loss`, the loss without smoothing.
    """

    needs_logprobs: ClassVar[bool] = True

    def __init__(self, *, label_smoothing: float) -> None:
        self._smoothing = label_smoothing
        self.output_spec = TokenOutputSpec(logsumexp=True, mean_logits=True)

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        assert inputs.outputs is not None
        leaves, trained = inputs.outputs, inputs.targets != IGNORED
        assert leaves.mean_logits is not None
        assert leaves.logsumexp is not None
        of_all = leaves.logsumexp - leaves.mean_logits
        losses = (self._smoothing - 1) * logprobs + self._smoothing * of_all
        figures = {"nll_loss": -logprobs.sum()}
        return LossValue(loss_sum=losses.sum(), metrics=figures, per_item=losses[trained])

    def logprob_grads(
        self, inputs: LossInputs, logprobs: Tensor | None, num_items: int
    ) -> LogprobGrads:
        return Loss.logprob_grads(self, inputs, logprobs, num_items)


NEXT_TOKEN = NextToken()
