"""The resources that each op of a shape reads and writes.

The only module that gives an op its declarations. Waits follow from them, so a line missing here is
a race: testkit/schedule_laws.py compares them with an independent model of ops,
testkit/oracle.py.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.step.ops import Op, OpKind, Resource, Role
from megatrain.step.places import block_places
from megatrain.step.shape import StepShape

CLIP_FACTOR: Resource = ("clip",)
ROUTING: Resource = ("routing",)


class OpTable:
    """Makes the ops of a shape, each with its declarations."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.places = block_places(shape)
        self._num_taped = len(shape.taped_layers) * shape.num_micro

    def comes_again(self, visit: int) -> bool:
        """Return whether backward comes again behind this visit of it: the first, or the second."""
        return self.shape.goes_back_twice and visit == 1

    def fetch(self, block: int) -> Op:
        places = self.places[block]
        return Op(
            kind=OpKind.FETCH,
            block=block,
            role=places.role,
            slot=places.slot,
            reads=(("weights", block),),
            writes=(places.weights,),
        )

    def gather(self, block: int) -> Op:
        places = self.places[block]
        return Op(
            kind=OpKind.GATHER,
            block=block,
            role=places.role,
            slot=places.slot,
            reads=(places.weights,),
            writes=(places.weights,),
        )

    def forward(self, block: int, micro: int, *, trains: bool) -> Op:
        places = self.places[block]
        reads, writes = [places.weights], list[Resource]()
        ring = None
        if places.role is Role.LAYER:
            reads.append(("hidden", micro))
            reads.extend(self._paged(block))
        keeps_input = trains and block in self.shape.taped_layers
        keeps_activations = trains and self._keeps(block)
        if keeps_input:
            ring = self._ring(block, micro)
            writes.append(_tape_place(block, micro, ring))
        elif keeps_activations:
            writes.append(("kept", block, micro))
        if self.shape.balances and places.role is Role.LAYER:
            writes.append(ROUTING)
            if (block, micro) != (self.shape.layers[0], 0):
                reads.append(ROUTING)
        return Op(
            kind=OpKind.FORWARD,
            block=block,
            role=places.role,
            micro=micro,
            slot=places.slot,
            tape_slot=ring,
            trains=trains,
            keeps_input=keeps_input,
            keeps_activations=keeps_activations,
            passes_gradient=keeps_activations and block > self.shape.lowest,
            reads=tuple(reads),
            writes=(("hidden", micro), *writes),
        )

    def stash(self, layer: int, micro: int) -> Op:
        ring = self._ring(layer, micro)
        return Op(
            kind=OpKind.STASH,
            block=layer,
            role=Role.LAYER,
            micro=micro,
            tape_slot=ring,
            reads=(_tape_place(layer, micro, ring),),
            writes=(("tape", layer, micro),),
        )

    def restore(self, layer: int, micro: int, *, visit: int = 1) -> Op:
        ring = self._ring(layer, micro, visit)
        return Op(
            kind=OpKind.RESTORE,
            block=layer,
            role=Role.LAYER,
            micro=micro,
            tape_slot=ring,
            reads=(("tape", layer, micro),),
            writes=(_tape_place(layer, micro, ring),),
        )

    def balance(self) -> Op:
        return Op(kind=OpKind.BALANCE, reads=(ROUTING,), writes=(ROUTING,))

    def head(self, micro: int, *, trains: bool, visit: int = 1) -> Op:
        """Visit 0, without `trains`, is that of leaves: the head that trains comes behind it."""
        shape, head = self.shape, self.shape.head
        places = self.places[head]
        read_blocks = (head, 0) if shape.tied else (head,)
        reads = [("hidden", micro), *(self.places[block].weights for block in read_blocks)]
        writes: list[Resource] = [("loss", micro)]
        if shape.balances and micro == 0:
            reads.append(ROUTING)
        passes_gradient = trains and head > shape.lowest
        if passes_gradient:
            writes.append(("dhidden", micro))
        if trains:
            for block in read_blocks:
                self._accumulate(block, reads, writes, adds=micro > 0)
        return Op(
            kind=OpKind.HEAD,
            block=head,
            role=places.role,
            micro=micro,
            slot=places.slot,
            grad_slot=places.grad_slot if trains else None,
            adds=trains and micro > 0,
            trains=trains,
            passes_gradient=passes_gradient,
            comes_again=self.comes_again(visit) if trains else visit == 0,
            reads=tuple(reads),
            writes=tuple(writes),
        )

    def backward(self, block: int, micro: int, *, visit: int = 1) -> Op:
        places = self.places[block]
        reads = [places.weights, ("dhidden", micro)]
        writes: list[Resource] = []
        ring = None
        if self._keeps(block):
            reads.append(("kept", block, micro))
        elif places.role is Role.LAYER:
            ring = self._ring(block, micro, visit)
            reads.append(_tape_place(block, micro, ring))
        if places.role is Role.LAYER:
            reads.extend(self._paged(block))
        if places.role is Role.LAYER and self.shape.balances:
            reads.append(ROUTING)
        passes_gradient = block > self.shape.lowest
        if passes_gradient:
            writes.append(("dhidden", micro))
        adds = micro > 0 or (places.role is Role.EMBEDDING and self.shape.tied)
        self._accumulate(block, reads, writes, adds=adds)
        return Op(
            kind=OpKind.BACKWARD,
            block=block,
            role=places.role,
            micro=micro,
            slot=places.slot,
            grad_slot=places.grad_slot,
            tape_slot=ring,
            keeps_activations=self._keeps(block),
            adds=adds,
            passes_gradient=passes_gradient,
            comes_again=self.comes_again(visit),
            reads=tuple(reads),
            writes=tuple(writes),
        )

    def exchange(self, block: int) -> Op:
        drain = self.drain(block)
        return replace(
            drain,
            kind=OpKind.EXCHANGE,
            lane=OpKind.EXCHANGE.spec.lane,
            host_grad=None,
            writes=drain.reads,
        )

    def drain(self, block: int) -> Op:
        places = self.places[block]
        assert places.grad_slot is not None, f"block {block} is frozen"
        return Op(
            kind=OpKind.DRAIN,
            block=block,
            role=places.role,
            grad_slot=places.grad_slot,
            host_grad=places.host_grad,
            reads=(("grad_slot", places.grad_slot),),
            writes=(places.drained,),
        )

    def norm(self, block: int, *, visit: int = 1) -> Op:
        """It makes a table out of rows before it measures it."""
        places = self.places[block]
        gathers = places.role is Role.EMBEDDING and self.shape.gather_embedding
        return Op(
            kind=OpKind.NORM,
            block=block,
            role=places.role,
            host_grad=places.host_grad,
            comes_again=self.comes_again(visit),
            reads=(places.drained,),
            writes=(("norm", block), *((places.drained,) if gathers else ())),
        )

    def clip(self) -> Op:
        norms = tuple(("norm", block) for block in self.shape.trained_blocks)
        return Op(kind=OpKind.CLIP, reads=norms, writes=(CLIP_FACTOR,))

    def momentum(self, block: int) -> Op:
        """It has the scale of the update that follows, whose gradient it makes a direction."""
        places, update = self.places[block], self.update(block)
        return replace(update, kind=OpKind.MOMENTUM, writes=(places.master, places.drained))

    def send(self, block: int) -> Op:
        places = self.places[block]
        return self._direction(OpKind.SEND, block, places.drained, self._sent_to(block))

    def collect(self, block: int) -> Op:
        """The parts of other ranks come to where this rank's is."""
        sent = self._sent_to(block)
        return replace(self._direction(OpKind.COLLECT, block, sent, sent), host_grad=None)

    def orthogonalize(self, block: int) -> Op:
        """Where compute shares the host's memory it finds directions in the gradient's place."""
        place = self._sent_to(block) if self.shape.copying else self.places[block].drained
        return self._direction(OpKind.ORTHOGONALIZE, block, place, place)

    def return_(self, block: int) -> Op:
        places = self.places[block]
        return self._direction(OpKind.RETURN, block, self._sent_to(block), places.drained)

    def _sent_to(self, block: int) -> Resource:
        slot = self.places[block].grad_slot
        assert slot is not None, f"block {block} is frozen"
        return ("grad_slot", slot)

    def _direction(self, kind: OpKind, block: int, read: Resource, written: Resource) -> Op:
        places = self.places[block]
        return Op(
            kind=kind,
            block=block,
            role=places.role,
            grad_slot=places.grad_slot if self.shape.copying else None,
            host_grad=places.host_grad,
            reads=(read,),
            writes=(written,),
        )

    def update(self, block: int) -> Op:
        """A late update takes its scale from clip; one in backward asks norm[b] if it is finite.

        In a second backward it does both.
        """
        places = self.places[block]
        scale = () if self.shape.update == "in_backward" else (CLIP_FACTOR,)
        finite = (("norm", block),) if self.shape.updates_in_backward else ()
        return Op(
            kind=OpKind.UPDATE,
            block=block,
            role=places.role,
            host_grad=places.host_grad,
            tier_slot=places.tier_slot,
            reads=(places.drained, *scale, *finite, places.master),
            writes=(places.master, ("weights", block)),
        )

    def read(self, block: int) -> Op:
        places = self.places[block]
        return Op(
            kind=OpKind.READ,
            block=block,
            role=places.role,
            tier_slot=places.tier_slot,
            reads=(("master", block),),
            writes=(places.master,),
        )

    def write(self, block: int) -> Op:
        places = self.places[block]
        return Op(
            kind=OpKind.WRITE,
            block=block,
            role=places.role,
            tier_slot=places.tier_slot,
            reads=(places.master,),
            writes=(("master", block),),
        )

    def _paged(self, block: int) -> list[Resource]:
        """Return what compute itself fetches of a layer: pages of its experts."""
        return [("weights", block)] if self.shape.pages else []

    def _keeps(self, block: int) -> bool:
        return self.shape.lowest_kept <= block < self.shape.head

    def _accumulate(
        self, block: int, reads: list[Resource], writes: list[Resource], *, adds: bool
    ) -> None:
        places = self.places[block]
        if places.grad_slot is not None:
            writes.append(("grad_slot", places.grad_slot))
            if adds:
                reads.append(("grad_slot", places.grad_slot))
            if places.adds_in_ring:
                writes.append(places.drained)

    def _ring(self, layer: int, micro: int, visit: int = 0) -> int | None:
        """Return the ring slot of a layer's input: in forward, or in a visit of backward.

        The ring turns by one with every input of forward, and continues to turn in backward.
        """
        shape = self.shape
        if shape.tape == "device":
            return None
        above = shape.taped_layers[-1] - layer if visit else layer - shape.bottom_layer
        return (visit * self._num_taped + above * shape.num_micro + micro) % shape.tape_slots


def _tape_place(layer: int, micro: int, ring: int | None) -> Resource:
    """Return where compute keeps and finds an input: in the ring, or on the device's own tape."""
    return ("tape", layer, micro) if ring is None else ("tape_slot", ring)
