"""The first backward gives norms alone, the second updates with the factor of them all.

    plain        HEAD BACKWARD DRAIN NORM UPDATE ...
    with this    HEAD BACKWARD DRAIN NORM ... CLIP HEAD BACKWARD DRAIN NORM UPDATE ...

So a gradient waits for its update in a ring of a few buffers, and not in memory for all of them. A
step costs one more backward: the recompute of each layer, its fetch and its drain.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind
from megatrain.step.passes import Draft, Mark, Step
from megatrain.step.program import CLIP_FACTOR, clip


class TwoBackwardPasses(Feature):
    """For a plain step whose updates run in backward."""

    def ops(self, step: Step) -> Iterable[Draft]:
        middle = next(i for i, op in enumerate(step.ops) if op.kind is Mark.BACKWARD_START) + 1
        forward, backward = step.ops[:middle], step.ops[middle:]
        if backward[-1].kind is not Mark.END:  # an evaluation
            return step.ops
        first = []
        for op in backward:
            if op.kind is OpKind.UPDATE:
                op.also(reads=(CLIP_FACTOR,))
            elif op.kind is not Mark.END:
                first.append(op.copy())
                first[-1].comes_again = True
        return [*forward, *first, clip(step.shape), *backward]
