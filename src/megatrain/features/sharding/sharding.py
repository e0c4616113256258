"""Parts are gathered behind the copy that brings one's own, and gradients exchanged before a drain.

GATHER(b)     behind FETCH(b): the parts of the other ranks, into the same slot
COLLECT(b)    behind SEND(b): the same for directions
EXCHANGE(b)   before DRAIN(b): the gradients of all ranks, each gets the part that it owns
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind
from megatrain.step.passes import Draft, Step, around

if TYPE_CHECKING:
    from megatrain.engine.actions import StepActions
    from megatrain.lanes.lane import Action

GATHERED_BY = {OpKind.FETCH: OpKind.GATHER, OpKind.SEND: OpKind.COLLECT}


class Sharding(Feature):
    """Completes what a rank has of its own."""

    def ops(self, step: Step) -> Iterable[Draft]:
        return around(step.ops, before=_exchange, behind=_gather)

    def actions(self, step: StepActions, table: Mapping[OpKind, Action]) -> Mapping[OpKind, Action]:
        gradients = step.machine.gradients
        return {
            OpKind.GATHER: step.machine.weights.gather,
            OpKind.EXCHANGE: gradients.exchange,
            OpKind.COLLECT: lambda op: gradients.directions.collect(op),
        }


def _exchange(op: Draft) -> Iterable[Draft]:
    if op.kind is OpKind.DRAIN:
        yield op.beside(OpKind.EXCHANGE, op.reads, op.reads)


def _gather(op: Draft) -> Iterable[Draft]:
    if isinstance(op.kind, OpKind) and op.kind in GATHERED_BY:
        yield op.beside(GATHERED_BY[op.kind], op.writes, op.writes)
