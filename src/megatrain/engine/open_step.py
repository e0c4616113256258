"""A step between its two phases: leaves for a loss of the caller's own, and the way back.

    part = engine.forward(batch, Wanted(entropy=True))
    loss = ...                        # of part.outputs, over all micro-batches of this rank
    result = part.backward(loss)

Weights cross the link as in one phase: forward leaves the last layers in their slots, and the tape
holds what backward needs. The price is one more product of the head, as for any loss that needs
log-probabilities first.

What goes back is the gradient of the loss with respect to each leaf. It travels as tensors that a
loss reads, beside the micro-batch: so the step can be repeated, and its micro-batches tried alone,
like any other.

Laws (tests/engine/test_open_step.py)
    1. Losses, gradients and weights are those of a step with the same loss, bit for bit.
    2. Each block is fetched and drained as often as in one phase, whatever the micro-batches.
    3. A step that is discarded leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.engine.results import StepResult
from megatrain.errors import BatchError
from megatrain.losses.leaves import TokenOutputs, TokenOutputSpec
from megatrain.losses.loss import LogprobGrads, Loss, LossInputs, LossValue

_GRADIENT = "gradient of "
_LOSS = "loss"
GoBack = Callable[[Loss, Sequence[Mapping[str, Tensor]]], StepResult]
"""Plays the second phase with a loss, and what it reads of each micro-batch."""


class ForwardPass:
    """A step whose first phase is done. Use `backward` or `discard`, once."""

    def __init__(
        self,
        *,
        leaves: Sequence[TokenOutputs],
        wanted: TokenOutputSpec,
        go_back: GoBack,
        drop: Callable[[], None],
    ) -> None:
        self.outputs = tuple(leaves)
        """Leaves of each micro-batch, on the host. With ranks, of those that this one computes."""
        self._wanted = wanted
        self._go_back = go_back
        self._drop = drop
        self._is_open = True

    def backward(self, loss: Tensor) -> StepResult:
        """Go back from a scalar that depends on the leaves; return the result of the step.

        The loss of the step is this number, not divided by anything: with ranks, the sum of theirs.
        `micro_losses` of the result is empty. Raises BatchError for what is not such a scalar, and
        as `Engine.step` does.
        """
        self._require_open()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise BatchError("the loss of a step must be a tensor with one number")
        if self.outputs and not loss.requires_grad:
            raise BatchError("the loss does not depend on any of the step's leaves")
        given = self._gradients(loss)
        self._is_open = False
        return self._go_back(Given(self._wanted, given[0] if given else {}), given)

    def discard(self) -> None:
        """Let go of the step, as if `forward` had not been called."""
        self._require_open()
        self._is_open = False
        self._drop()

    def _require_open(self) -> None:
        if not self._is_open:
            raise BatchError("the step has gone back, or was discarded, before")

    def _gradients(self, loss: Tensor) -> list[dict[str, Tensor]]:
        """Return what `Given` reads of each micro-batch; the first one has the loss."""
        leaves = [
            (at, name, leaf)
            for at, one in enumerate(self.outputs)
            for name, leaf in one.named().items()
            if leaf.requires_grad
        ]
        found: Sequence[Tensor | None] = ()
        if leaves:
            wanted = [leaf for _, _, leaf in leaves]
            found = torch.autograd.grad(loss.reshape(()), wanted, allow_unused=True)
        used = {name for (_, name, _), d in zip(leaves, found, strict=True) if d is not None}
        value = loss.detach().float().reshape(()).cpu()
        given = [{_LOSS: value if at == 0 else torch.zeros(())} for at in range(len(self.outputs))]
        for (at, name, leaf), d in zip(leaves, found, strict=True):
            if name in used or name == "logprobs":
                gradient = torch.zeros_like(leaf) if d is None else d
                given[at][_GRADIENT + name] = gradient.contiguous()
        if "logits" in used:
            for at, one in enumerate(self.outputs):
                assert one.tokens is not None
                given[at]["tokens"] = one.tokens
        return given


class Given(Loss):
    """The loss of an open step: its gradients come beside the micro-batches."""

    needs_logprobs: ClassVar[bool] = False

    def __init__(self, wanted: TokenOutputSpec, given: Mapping[str, Tensor] | None = None) -> None:
        """`given` has the names of what comes in the second phase."""
        self.output_spec = wanted
        self._leaves = [
            name.removeprefix(_GRADIENT) for name in given or () if name.startswith(_GRADIENT)
        ]

    def check(self, batch: Sequence[MicroBatch]) -> None:
        """Raise BatchError for a batch that lacks what the leaves need, or has more."""
        names = set() if self.output_spec.tokens is None else {self.output_spec.tokens}
        for number, micro in enumerate(batch):
            for name in sorted(names ^ micro.loss_tensors.keys()):
                fault = "has no" if name in names else "has"
                raise BatchError(
                    f"micro-batch {number}: loss_tensors {fault} {name!r}; `forward` reads what "
                    "`TokenOutputSpec.tokens` names, and your own loss gets nothing else from there"
                )
            for name in names:
                tokens = micro.loss_tensors[name]
                if tokens.dim() != 3 or tokens.shape[:2] != micro.input_ids.shape:
                    raise BatchError(
                        f"micro-batch {number}: {name} is {tuple(tokens.shape)}, input_ids "
                        f"{tuple(micro.input_ids.shape)}; it must be (rows, length, k)"
                    )

    def num_items(self, inputs: LossInputs) -> int:
        return 1

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        raise AssertionError("an open step has gradients, and no formula")

    def logprob_grads(
        self, inputs: LossInputs, logprobs: Tensor | None, num_items: int
    ) -> LogprobGrads:
        found = {name: inputs.loss_tensors[_GRADIENT + name] for name in self._leaves}
        tokens = inputs.loss_tensors["tokens"] if "logits" in found else None
        leaves = TokenOutputs(**found, tokens=tokens)
        return LogprobGrads(
            logprob_grads=leaves.logprobs,
            loss=inputs.loss_tensors[_LOSS],
            others=None if leaves.is_plain else leaves,
        )
