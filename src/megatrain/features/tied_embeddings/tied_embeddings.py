"""The head reads the embedding's table too, and adds to its gradient before the embedding does.

The gradient of the table is in the slot "edge" from the first HEAD to DRAIN(0), the head's parts
first. The other params of the head use the slot "head".
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind
from megatrain.step.passes import Draft, Step
from megatrain.step.program import accumulate


class TiedEmbeddings(Feature):
    """Heads use two blocks."""

    def places(self, step: Step) -> None:
        places, head = step.places, step.shape.head
        if step.shape.trained[0]:
            places["grad_sum", 0] = ("grad_slot", "edge")
        if step.shape.trained[head]:
            places["grad_sum", head] = ("grad_slot", "head")
            if places["drained_grad", head][0] == "host_grad":
                places["drained_grad", head] = ("host_grad", "head")

    def ops(self, step: Step) -> Iterable[Draft]:
        is_trained = step.shape.trained[0]
        for op in step.ops:
            if op.kind is OpKind.HEAD:
                op.also(reads=(("fetched", 0),))
                if op.trains and is_trained:
                    accumulate(op, 0)
            elif op.kind is OpKind.BACKWARD and op.block == 0 and not op.adds:
                op.adds = True
                op.also(reads=(("grad_sum", 0),))
        return step.ops
