"""Forward counts what routers do, and backward needs the counts of all layers and all ranks.

BALANCE is the op in which ranks add up their counts, before the first HEAD. The op does not depend
on micro-batches: a rank that has none takes part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.engine.features import Feature
from megatrain.step.ops import Op, OpKind, Resource
from megatrain.step.passes import Draft, Mark, Step, around

if TYPE_CHECKING:
    from megatrain.engine.actions import StepActions
    from megatrain.lanes.lane import Action

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

    def actions(self, step: StepActions, table: Mapping[OpKind, Action]) -> Mapping[OpKind, Action]:
        def add_up(op: Op) -> int:
            if step.routing is None:  # on all ranks, which predict together
                return 0
            assert step.machine.shared_routing is not None
            return step.machine.shared_routing.add_up(step.routing, step.part)

        return {OpKind.BALANCE: add_up}

    def _balance(self, op: Draft) -> Iterable[Draft]:
        if op.kind is Mark.BACKWARD_START:
            yield Draft(OpKind.BALANCE, None, None, (ROUTING,), (ROUTING,))
