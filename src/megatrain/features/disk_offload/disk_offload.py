"""READ brings masters and moments before an update, WRITE takes them back.

Layers take turns in a ring of buffers, in the order of updates. Embedding and head, often the
largest blocks, share the buffer "edge": one is the first to be updated, the other the last.

An update of this step is read for from its start on. Late updates are on top of the next list, so
this one reads for the first of them, at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind, Resource
from megatrain.step.passes import Draft, Mark, Step, around, stream

if TYPE_CHECKING:
    from megatrain.engine.actions import StepActions
    from megatrain.lanes.lane import Action


@dataclass(frozen=True)
class DiskOffload(Feature):
    """Gives states a ring of `num_slots` buffers for the layers, and one buffer for the edges."""

    num_slots: int

    def places(self, step: Step) -> None:
        shape, turn = step.shape, 0
        for block in shape.update_order:
            is_layer = block in shape.layers
            slot = turn % self.num_slots if is_layer else "edge"
            step.places["optim_state", block] = ("tier_slot", slot)
            turn += is_layer

    def ops(self, step: Step) -> Iterable[Draft]:
        step.ops = list(around(step.ops, behind=_write))
        start = Mark.END if step.shape.update == "late" else Mark.START
        return stream(step, "optim_state", _read, start)

    def actions(self, step: StepActions, table: Mapping[OpKind, Action]) -> Mapping[OpKind, Action]:
        ring, updates = step.machine.tier_ring, step.machine.updates
        assert ring is not None
        return {
            OpKind.READ: ring.read,
            OpKind.WRITE: lambda op: updates.write_back(op, ring),
        }


def _write(op: Draft) -> Iterable[Draft]:
    if op.kind is OpKind.UPDATE:
        block = op.block or 0
        yield op.beside(OpKind.WRITE, (("optim_state", block),), (("master", block),))


def _read(state: Resource, user: Draft) -> Draft:
    return user.beside(OpKind.READ, (("master", state[1]),), (state,))
