"""Forward leaves a layer's input in a ring on the device, from where it goes to the host and back.

    STASH(b,m)      behind FORWARD(b,m): from the ring to the host
    RESTORE(b,m)    into the ring, as early as it has room: the first ones before backward starts,
                    for the first inputs to restore have just been stashed, each other one behind
                    the BACKWARD that frees its place

The ring turns by one with each input of forward, and goes on turning in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from megatrain.engine.features import Feature
from megatrain.step.ops import OpKind, Resource
from megatrain.step.passes import Draft, Mark, Step


@dataclass(frozen=True)
class ActivationOffload(Feature):
    """Gives saved inputs a ring of `num_slots` places on the device."""

    num_slots: int

    def ops(self, step: Step) -> Iterable[Draft]:
        turn = 0
        restores: list[Draft] = []
        for op in step.ops:
            saved = _saved_input(op)
            if saved is not None:
                op.places = {saved: ("tape_slot", turn % self.num_slots)}
                turn += 1
                if op.kind is OpKind.BACKWARD:
                    restores.append(op.beside(OpKind.RESTORE, (_home(op),), (saved,)))
        return self._moved(step.ops, iter(restores))

    def _moved(self, ops: Iterable[Draft], restores: Iterator[Draft]) -> Iterator[Draft]:
        for op in ops:
            if op.kind is Mark.BACKWARD_START:
                yield from islice(restores, self.num_slots)
            yield op
            saved = _saved_input(op)
            if saved is None:
                continue
            if op.kind is OpKind.FORWARD:
                yield op.beside(OpKind.STASH, (saved,), (_home(op),))
            else:
                yield from islice(restores, 1)


def _saved_input(op: Draft) -> Resource | None:
    """Return the saved input that an op of compute leaves or finds, if any."""
    for things in (op.writes, op.reads):
        for thing in things:
            if thing[0] == "saved_input":
                return thing
    return None


def _home(op: Draft) -> Resource:
    return ("tape", op.block or 0, op.micro or 0)
