"""FETCH(0) gathers rows, and NORM(0) spreads their gradient over that of the table."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind
from megatrain.step.passes import Draft, Step


class EmbeddingRows(Feature):
    """Gathers and spreads rows of block 0 on the host."""

    def places(self, step: Step) -> None:
        """Let rows add up where the head's gradient was, which is larger, or else where layers do.

        A head that is frozen leaves no place that is large enough.
        """
        shape = step.shape
        if shape.trained[0] and not shape.trained[shape.head] and ("grad_sum", 0) in step.places:
            turn = sum(shape.trained[layer] for layer in shape.layers)
            step.places["grad_sum", 0] = ("grad_slot", turn % shape.grad_slots)

    def ops(self, step: Step) -> Iterable[Draft]:
        for op in step.ops:
            if op.block == 0 and op.kind is OpKind.NORM:  # it makes a table before it measures it
                op.also(writes=(("drained_grad", 0),))
        return step.ops
