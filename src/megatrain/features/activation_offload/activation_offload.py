"""Forward leaves a layer's input in a ring on the device, from where it goes to the host and back.

    STASH(b,m)      behind FORWARD(b,m): from the ring to the host
    RESTORE(b,m)    into the ring, as early as it has room: the first ones before backward starts,
                    for the first inputs to restore have just been stashed, each other one behind
                    the BACKWARD that frees its place

The ring turns by one with each input of forward, and goes on turning in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from megatrain.engine.features import Feature
from megatrain.step.ops import Op, OpKind, Resource
from megatrain.step.passes import Draft, Mark, Step

if TYPE_CHECKING:
    from megatrain.engine.actions import StepActions
    from megatrain.lanes.lane import Action


@dataclass(frozen=True)
class ActivationOffload(Feature):
    """Gives saved inputs a ring of `num_slots` places on the device."""

    num_slots: int

    def ops(self, step: Step) -> Iterable[Draft]:
        inputs: dict[Draft, Resource] = {}
        for op in step.ops:
            if op.kind in (OpKind.FORWARD, OpKind.BACKWARD):
                for thing in op.writes if op.kind is OpKind.FORWARD else op.reads:
                    if thing[0] == "saved_input":
                        op.places = {thing: ("tape_slot", len(inputs) % self.num_slots)}
                        inputs[op] = thing
        return self._moved(step.ops, inputs)

    def _moved(self, ops: Iterable[Draft], inputs: Mapping[Draft, Resource]) -> Iterator[Draft]:
        restores = (
            op.beside(OpKind.RESTORE, (_home(saved),), (saved,))
            for op, saved in inputs.items()
            if op.kind is OpKind.BACKWARD
        )
        for op in ops:
            if op.kind is Mark.BACKWARD_START:
                yield from islice(restores, self.num_slots)
            yield op
            if (saved := inputs.get(op)) is None:
                continue
            if op.kind is OpKind.FORWARD:
                yield op.beside(OpKind.STASH, (saved,), (_home(saved),))
            else:
                yield from islice(restores, 1)

    def actions(self, step: StepActions, table: Mapping[OpKind, Action]) -> Mapping[OpKind, Action]:
        tape = step.machine.tape
        return {
            OpKind.STASH: lambda op: tape.stash(*_key_and_slot(op)),
            OpKind.RESTORE: lambda op: tape.restore(*_key_and_slot(op)),
        }


def _key_and_slot(op: Op) -> tuple[tuple[int, int], int]:
    """Return layer and micro-batch of an input, and where in the ring it is."""
    _, slot = op.place("saved_input", op.block, op.micro)
    return (op.block or 0, op.micro or 0), int(slot)


def _home(saved: Resource) -> Resource:
    """Return where a saved input is on the host."""
    return ("tape", *saved[1:])
