"""Activations of the top layers stay on the device from forward to backward.

    plain        FORWARD(b,m) saves the layer's input; BACKWARD(b,m) computes the layer once more
    with this    FORWARD(b,m) leaves all that backward needs in kept[b,m]; BACKWARD(b,m) goes back

So such a layer has no saved input that could be offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind, Resource
from megatrain.step.passes import Draft, Step


@dataclass(frozen=True)
class SavedActivations(Feature):
    """Applies to the `num_layers` layers that backward reaches first; more than there are: all."""

    num_layers: int

    def ops(self, step: Step) -> Iterable[Draft]:
        shape = step.shape
        for op in step.ops:
            if op.block is not None and op.block >= shape.head - self.num_layers:
                saved = ("saved_input", op.block, op.micro)
                if saved in op.writes or saved in op.reads:
                    kept: Resource = ("kept", op.block, op.micro or 0)
                    op.reads = tuple(kept if one == saved else one for one in op.reads)
                    op.writes = tuple(kept if one == saved else one for one in op.writes)
                    # Its graph is made in forward, which has to know what it will be asked for.
                    if op.kind is OpKind.FORWARD:
                        op.passes_gradient = op.block > shape.lowest
        return step.ops
