"""Forward counts what routers do, and backward needs the counts of all layers and all ranks.

BALANCE is the op in which ranks add up their counts, before the first HEAD. The op does not depend
on micro-batches: a rank that has none takes part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind, Resource
from megatrain.step.passes import Draft, Mark, Step, around

ROUTING: Resource = ("routing",)


@dataclass(frozen=True)
class RouterLoss(Feature):
    """Makes the counts a resource of all ops of layers."""

    among_ranks: bool

    def ops(self, step: Step) -> Iterable[Draft]:
        layers = step.shape.layers
        is_counted = False
        for op in step.ops:
            if op.kind is OpKind.FORWARD and op.block in layers:
                op.also(reads=(ROUTING,) if is_counted else (), writes=(ROUTING,))
                is_counted = True
            elif (op.kind is OpKind.HEAD and op.micro == 0) or (
                op.kind is OpKind.BACKWARD and op.block in layers
            ):
                op.also(reads=(ROUTING,))
        return around(step.ops, before=self._balance) if self.among_ranks else step.ops

    def _balance(self, op: Draft) -> Iterable[Draft]:
        if op.kind is Mark.BACKWARD_START:
            yield Draft(OpKind.BALANCE, None, None, (ROUTING,), (ROUTING,))
