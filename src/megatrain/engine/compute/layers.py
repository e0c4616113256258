"""What FORWARD and BACKWARD do with a layer: compute its output, or its gradients by recompute.

Laws (tests/engine/test_exactness.py)
    1. Output and gradients are those of ordinary autograd through the layer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.engine.compute.graph import gradients_of
from megatrain.models.compiled import LayerOutput
from megatrain.models.stand_ins import Call
from megatrain.models.template import Template

AddGradients = Callable[[Mapping[str, Tensor | None]], None]
"""Adds gradients by param name to the sums of the op's block."""
Balance = Callable[[Sequence[Tensor]], list[tuple[Tensor, Tensor]]]
"""From the logits of a layer's routers to what the balancing loss is made of, with gradients."""


class Returned(NamedTuple):
    """What comes back to a layer whose output was `given`'s."""

    d_hidden: Tensor
    balance: Balance


class Layers:
    """The layers of one model."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def forward(self, weights: Mapping[str, Tensor], hidden: Tensor, call: Call) -> LayerOutput:
        """Return what the layer of `call` makes of `hidden`, and the logits of its routers."""
        with torch.no_grad():
            return self._template.routed_layer(weights, hidden, call)

    def backward(
        self,
        leaves: Mapping[str, Tensor],
        given: Tensor,
        call: Call,
        returned: Returned,
        add: AddGradients,
    ) -> Tensor | None:
        """Add up the gradients of `leaves`; return that of `given`, if it is wanted."""
        with torch.enable_grad():
            hidden, logits = self._template.routed_layer(leaves, given, call)
            balance = returned.balance(logits)
        grads = gradients_of([(hidden, returned.d_hidden), *balance], leaves, given)
        add(grads.params)
        return grads.given
