"""The resources that each op of a shape reads and writes, and the places it uses.

The only module that gives an op its declarations. Waits follow from them, so a line missing here is
a race: testkit/schedule_laws.py compares them with an independent model of ops,
testkit/oracle.py.

Places (tests/step/test_resources.py)
    1. Layer b lives in slot (b-1) % slots, in forward and in backward, so at the turn the last
       slots layers are where backward needs them.
    2. Embedding and head never take a layer's place. Each has its own slot. They share the
       gradient slot "edge"; if they are tied, the table's gradient stays in "edge" from the first
       HEAD to DRAIN(0), the head's parts first, and the head's other params use "head".
    3. The rings of tape, gradients, host gradients and the tier restart in each step, so all steps
       of a shape are the same ops.
    4. Between disk and update layers take turns in update order. Embedding and head, often the
       largest blocks, share the tier slot "edge": one is the first to be updated, the other the
       last.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.step.ops import Op, OpKind, Resource, Role, SlotId
from megatrain.step.shape import StepShape

CLIP_FACTOR: Resource = ("clip",)
ROUTING: Resource = ("routing",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlaces:
    """Where the bytes of one block pass on their way."""

    role: Role
    slot: SlotId | None
    """None: never fetched, compute reads the store."""
    weights: Resource
    """What compute reads: the slot, or the store itself."""
    grad_slot: SlotId | None
    """None: frozen."""
    host_grad: SlotId | None
    """None: frozen, or the gradient has its own place, grad[b]."""
    drained: Resource
    """The place of the gradient on the host: grad[b], or the ring."""
    tier_slot: SlotId | None
    """None: frozen, or masters and moments stay in host memory."""
    master: Resource
    """What an update works in: master[b], or the ring between it and the disk."""


def block_places(shape: StepShape) -> list[BlockPlaces]:
    """Return the places of each block. Layers take turns, edges have names."""
    slots: dict[int, SlotId] = {0: "embedding", shape.head: "head"}
    slots |= {layer: turn % shape.slots for turn, layer in enumerate(shape.layers)}
    grad_slots: dict[int, SlotId] = {0: "edge", shape.head: "head" if shape.tied else "edge"}
    host_grads = grad_slots.copy()
    trained_layers = [layer for layer in shape.layers if shape.trained[layer]]
    for turn, layer in enumerate(reversed(trained_layers)):
        grad_slots[layer] = turn % shape.grad_slots
        host_grads[layer] = turn % shape.host_grads
    tier_slots: dict[int, SlotId] = {0: "edge", shape.head: "edge"}
    ordered_layers = [block for block in shape.update_order if block in shape.layers]
    tier_slots |= {layer: turn % shape.tier_slots for turn, layer in enumerate(ordered_layers)}
    in_ring = shape.update == "in_backward" or shape.spills
    return [
        BlockPlaces(
            role=shape.role(block),
            slot=slots[block] if shape.copying else None,
            weights=("slot", slots[block]) if shape.copying else ("weights", block),
            grad_slot=grad_slots[block] if trained else None,
            host_grad=host_grads[block] if trained and in_ring else None,
            drained=("host_grad", host_grads[block]) if trained and in_ring else ("grad", block),
            tier_slot=tier_slots[block] if trained and shape.has_tier else None,
            master=("tier_slot", tier_slots[block])
            if trained and shape.has_tier
            else ("master", block),
        )
        for block, trained in enumerate(shape.trained)
    ]


class OpTable:
    """Makes the ops of a shape, each with its declarations."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.places = block_places(shape)
        self._num_taped = (shape.last_layer - shape.bottom_layer + 1) * shape.num_micro

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

    def forward(self, block: int, micro: int, *, trains: bool) -> Op:
        places = self.places[block]
        reads, writes = [places.weights], list[Resource]()
        ring = None
        if places.role is Role.LAYER:
            reads.append(("hidden", micro))
        keeps_input = trains and block >= self.shape.bottom_layer
        if keeps_input:
            ring = self._ring(block, micro, backward=False)
            writes.append(_tape_place(block, micro, ring))
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
            reads=tuple(reads),
            writes=(("hidden", micro), *writes),
        )

    def stash(self, layer: int, micro: int) -> Op:
        ring = self._ring(layer, micro, backward=False)
        return Op(
            kind=OpKind.STASH,
            block=layer,
            role=Role.LAYER,
            micro=micro,
            tape_slot=ring,
            reads=(_tape_place(layer, micro, ring),),
            writes=(("tape", layer, micro),),
        )

    def restore(self, layer: int, micro: int) -> Op:
        ring = self._ring(layer, micro, backward=True)
        return Op(
            kind=OpKind.RESTORE,
            block=layer,
            role=Role.LAYER,
            micro=micro,
            tape_slot=ring,
            reads=(("tape", layer, micro),),
            writes=(_tape_place(layer, micro, ring),),
        )

    def head(self, micro: int, *, trains: bool) -> Op:
        shape, head = self.shape, self.shape.head
        places = self.places[head]
        read_blocks = (head, 0) if shape.tied else (head,)
        reads = [("hidden", micro), *(self.places[block].weights for block in read_blocks)]
        writes: list[Resource] = [("loss", micro)]
        if shape.balances and micro == 0:
            reads.append(ROUTING)
        passes_gradient = trains and head > shape.lowest
        if trains:
            if passes_gradient:
                writes.append(("dhidden", micro))
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
            reads=tuple(reads),
            writes=tuple(writes),
        )

    def backward(self, block: int, micro: int) -> Op:
        places = self.places[block]
        reads = [places.weights, ("dhidden", micro)]
        writes: list[Resource] = []
        ring = None
        if places.role is Role.LAYER:
            ring = self._ring(block, micro, backward=True)
            reads.append(_tape_place(block, micro, ring))
            if self.shape.balances:
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
            adds=adds,
            passes_gradient=passes_gradient,
            reads=tuple(reads),
            writes=tuple(writes),
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

    def norm(self, block: int) -> Op:
        places = self.places[block]
        return Op(
            kind=OpKind.NORM,
            block=block,
            role=places.role,
            host_grad=places.host_grad,
            reads=(places.drained,),
            writes=(("norm", block), *((places.drained,) if self._spreads(block) else ())),
        )

    def clip(self) -> Op:
        norms = tuple(("norm", block) for block in self.shape.trained_blocks)
        return Op(kind=OpKind.CLIP, reads=norms, writes=(CLIP_FACTOR,))

    def update(self, block: int) -> Op:
        """A late update takes its scale from clip; one in backward asks norm[b] if it is finite.

        A gradient that waited on disk is read with the master.
        """
        places, spills = self.places[block], self.shape.spills
        scale: Resource = CLIP_FACTOR if self.shape.update == "late" else ("norm", block)
        return Op(
            kind=OpKind.UPDATE,
            block=block,
            role=places.role,
            host_grad=None if spills else places.host_grad,
            tier_slot=places.tier_slot,
            reads=(*(() if spills else (places.drained,)), scale, places.master),
            writes=(places.master, ("weights", block)),
        )

    def spill(self, block: int) -> Op:
        places = self.places[block]
        return Op(
            kind=OpKind.SPILL,
            block=block,
            role=places.role,
            host_grad=places.host_grad,
            reads=(places.drained,),
            writes=(("grad", block),),
        )

    def read(self, block: int) -> Op:
        places = self.places[block]
        waiting = (("grad", block),) if self.shape.spills else ()
        return Op(
            kind=OpKind.READ,
            block=block,
            role=places.role,
            tier_slot=places.tier_slot,
            reads=(("master", block), *waiting),
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

    def _spreads(self, block: int) -> bool:
        """Return whether NORM makes the block's gradient out of rows before it measures it."""
        return self.shape.role(block) is Role.EMBEDDING and self.shape.gather_embedding

    def _accumulate(
        self, block: int, reads: list[Resource], writes: list[Resource], *, adds: bool
    ) -> None:
        if (grad_slot := self.places[block].grad_slot) is not None:
            writes.append(("grad_slot", grad_slot))
            if adds:
                reads.append(("grad_slot", grad_slot))

    def _ring(self, layer: int, micro: int, *, backward: bool) -> int | None:
        """Return the ring slot of a layer's input, in forward or in backward.

        The ring turns by one with every input of forward, and continues to turn in backward.
        """
        shape = self.shape
        if shape.tape == "device":
            return None
        if backward:
            turn = self._num_taped + (shape.last_layer - layer) * shape.num_micro + micro
        else:
            turn = (layer - shape.bottom_layer) * shape.num_micro + micro
        return turn % shape.tape_slots


def _tape_place(layer: int, micro: int, ring: int | None) -> Resource:
    """Return where compute keeps and finds an input: in the ring, or on the device's own tape."""
    return ("tape", layer, micro) if ring is None else ("tape_slot", ring)
