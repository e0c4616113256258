"""Gradients of a layer's matrices become directions, which the device orthogonalizes.

    MOMENTUM(b)        gradients into directions, on the host
    SEND(b)            to the device, where the gradient added up before
    ORTHOGONALIZE(b)   each matrix as a whole
    RETURN(b)          back to the host; then UPDATE(b)

Late updates are between the blocks of forward, each before the fetch of its block, for the fetch
is what reads the weights that it writes. A layer begins before the update of the one before, so
that lanes overlap, unless both need one place.

In backward a layer is updated behind the backward of the next one, which uses another gradient slot
meanwhile. With one slot for all, nothing can come between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.engine.features import Feature
from megatrain.step.ops import Op, OpKind, Resource
from megatrain.step.passes import Draft, Mark, Step

if TYPE_CHECKING:
    from megatrain.engine.actions import StepActions
    from megatrain.lanes.lane import Action


@dataclass(frozen=True)
class Muon(Feature):
    """Orthogonalizes the matrices of some layers."""

    blocks: frozenset[int]

    def places(self, step: Step) -> None:
        for block in self.blocks:
            step.places["direction", block] = step.places["grad_sum", block]

    def ops(self, step: Step) -> Iterable[Draft]:
        updates = [op for op in step.ops if op.left]
        return self._late(step, updates) if updates else self._in_backward(step)

    def _late(self, step: Step, updates: list[Draft]) -> Iterator[Draft]:
        groups = dict(self._groups(step, updates))
        head = step.shape.head
        for op in step.ops:
            if op.kind is OpKind.FETCH and op.block is not None:
                yield from groups.pop(op.block, ())
                if op.block == head - 1:  # the head is fetched with the last layer
                    yield from groups.pop(head, ())
            if not op.left:
                yield op

    def _groups(self, step: Step, updates: list[Draft]) -> Iterator[tuple[int, list[Draft]]]:
        """Yield what updates each block, and begins with the next one if it can."""
        begun: set[int | None] = set()
        for update, following in zip(updates, [*updates[1:], None], strict=True):
            assert update.block is not None
            group: list[Draft] = []
            if update.block in self.blocks:
                for other in (update, following):
                    if other and other.block not in begun and self._may_begin(step, other, update):
                        begun.add(other.block)
                        group += [*_begun(other), _orthogonalized(other)]
                group.append(_returned(update))
            yield update.block, [*group, update]

    def _may_begin(self, step: Step, other: Draft, update: Draft) -> bool:
        """Return whether directions can be made before an update: its own, or those of the next."""
        if other is update or other.block not in self.blocks:
            return other is update
        used, wanted = (
            {step.places[family, op.block or 0] for family in ("direction", "optim_state")}
            for op in (update, other)
        )
        return not used & wanted

    def _in_backward(self, step: Step) -> Iterator[Draft]:
        held: list[Draft] = []
        for op in step.ops:
            if op.kind in (OpKind.DRAIN, Mark.END):
                yield from held
                held = []
            if op.kind is OpKind.UPDATE and op.block in self.blocks:
                yield from _begun(op)
                held = [_orthogonalized(op), _returned(op), op]
                if step.shape.grad_slots == 1:
                    yield from held
                    held = []
            else:
                yield op

    def actions(self, step: StepActions, table: Mapping[OpKind, Action]) -> Mapping[OpKind, Action]:
        machine, gradients = step.machine, step.machine.gradients

        def momentum(op: Op) -> int:
            return machine.updates.look_ahead(op, gradients.flat(op), machine.tier_region(op))

        def orthogonalize(op: Op) -> None:
            in_slot = op.place("direction")[0] == "grad_slot"
            gradients.directions.orthogonalize(op, () if in_slot else gradients.flat(op))

        return {
            OpKind.MOMENTUM: momentum,
            OpKind.SEND: lambda op: gradients.directions.send(op, gradients.flat(op)),
            OpKind.ORTHOGONALIZE: orthogonalize,
            OpKind.RETURN: lambda op: gradients.directions.give_back(op, gradients.flat(op)),
        }


def _begun(update: Draft) -> Iterator[Draft]:
    """Yield what makes directions and sends them. Momentum has the scale of the update."""
    gradient, state = _drained(update), ("optim_state", update.block or 0)
    yield update.beside(OpKind.MOMENTUM, update.reads, (state, gradient))
    yield update.beside(OpKind.SEND, (gradient,), (_direction(update),))


def _orthogonalized(update: Draft) -> Draft:
    direction = (_direction(update),)
    return update.beside(OpKind.ORTHOGONALIZE, direction, direction)


def _returned(update: Draft) -> Draft:
    return update.beside(OpKind.RETURN, (_direction(update),), (_drained(update),))


def _drained(update: Draft) -> Resource:
    return ("drained_grad", update.block or 0)


def _direction(update: Draft) -> Resource:
    return ("direction", update.block or 0)
