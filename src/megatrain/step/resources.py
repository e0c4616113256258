"""The resources that each op of a shape reads and writes, and the places it uses.

The only module that gives an op its declarations. Waits follow from them, so a line missing here is
a race: testkit/schedule_laws.py compares them with an independent model of ops,
testkit/oracle.py.

Places (tests/step/test_resources.py)
    1. Layer b lives in slot (b-1) % slots, in forward and in backward, so at the turn the last
       slots layers are where backward needs them.
    2. Embedding and head never take a layer's weight slot. Each has its own. They share the
       gradient slot "edge"; if they are tied, the table's gradient stays in "edge" from the first
       HEAD to DRAIN(0), the head's parts first, and the head's other params use "head".
       Pieces of the head take turns with the layers instead. So does the embedding by rows,
       unless a head that is there whole has room for them.
    3. The rings of tape, gradients, host gradients and the tier restart in each step, so all steps
       of a shape are the same ops.
    4. Between disk and update layers take turns in update order. Embedding and head, often the
       largest blocks, share the tier slot "edge": one is the first to be updated, the other the
       last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

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
    grad_slots: tuple[SlotId, ...]
    """Of its pieces, one after another, which for most blocks is one. None: frozen."""
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
    grad_slots = _grad_slots(shape)
    host_grads: dict[int, SlotId] = {0: "edge", shape.head: "head" if shape.tied else "edge"}
    trained_layers = [layer for layer in shape.layers if shape.trained[layer]]
    for turn, layer in enumerate(reversed(trained_layers)):
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
            grad_slots=grad_slots.get(block, ()),
            host_grad=host_grads[block] if trained and in_ring else None,
            drained=("host_grad", host_grads[block]) if trained and in_ring else ("grad", block),
            tier_slot=tier_slots[block] if trained and shape.has_tier else None,
            master=("tier_slot", tier_slots[block])
            if trained and shape.has_tier
            else ("master", block),
        )
        for block, trained in enumerate(shape.trained)
    ]


def _grad_slots(shape: StepShape) -> dict[int, tuple[SlotId, ...]]:
    """Return the gradient slots of each trained block, as backward reaches them."""
    turns = (turn % shape.grad_slots for turn in count())
    slots: dict[int, tuple[SlotId, ...]] = {}
    for block in reversed(shape.trained_blocks):
        role = shape.role(block)
        if role is Role.HEAD and shape.head_pieces > 1:
            slots[block] = tuple(next(turns) for _ in range(shape.head_pieces))
        elif role is Role.HEAD:
            slots[block] = ("head" if shape.tied else "edge",)
        elif role is Role.EMBEDDING and not shape.rows_take_turns:
            slots[block] = ("edge",)
        else:
            slots[block] = (next(turns),)
    return slots


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
        goes_back = trains and shape.head_pieces == 1
        passes_gradient = goes_back and head > shape.lowest
        if passes_gradient:
            writes.append(("dhidden", micro))
        if goes_back:
            for block in read_blocks:
                self._accumulate(block, reads, writes, adds=micro > 0)
        elif trains:
            writes.append(("scored", micro))
        return Op(
            kind=OpKind.HEAD,
            block=head,
            role=places.role,
            num_pieces=shape.head_pieces,
            micro=micro,
            slot=places.slot,
            grad_slot=self._grad_slot(head) if goes_back else None,
            adds=goes_back and micro > 0,
            trains=trains,
            passes_gradient=passes_gradient,
            reads=tuple(reads),
            writes=tuple(writes),
        )

    def piece(self, piece: int, micro: int) -> Op:
        """The last piece also goes back through what is before the projection."""
        shape, head = self.shape, self.shape.head
        places = self.places[head]
        reads = [("hidden", micro), places.weights, ("scored", micro)]
        last = piece == shape.head_pieces - 1
        writes: list[Resource] = [] if last else [("scored", micro)]
        passes_gradient = last and head > shape.lowest
        if passes_gradient:
            writes.append(("dhidden", micro))
        self._accumulate(head, reads, writes, adds=micro > 0, piece=piece)
        return Op(
            kind=OpKind.PIECE,
            block=head,
            role=places.role,
            piece=piece,
            num_pieces=shape.head_pieces,
            micro=micro,
            slot=places.slot,
            grad_slot=self._grad_slot(head, piece),
            adds=micro > 0,
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
            grad_slot=self._grad_slot(block),
            tape_slot=ring,
            adds=adds,
            passes_gradient=passes_gradient,
            reads=tuple(reads),
            writes=tuple(writes),
        )

    def drain(self, block: int, piece: int | None = None) -> Op:
        """Without a piece: all of the gradient, or the last piece of it."""
        places = self.places[block]
        assert places.grad_slots, f"block {block} is frozen"
        num_pieces = len(places.grad_slots)
        if piece is None and num_pieces > 1:
            piece = num_pieces - 1
        slot = places.grad_slots[piece or 0]
        return Op(
            kind=OpKind.DRAIN,
            block=block,
            role=places.role,
            piece=piece,
            num_pieces=num_pieces,
            grad_slot=slot,
            host_grad=places.host_grad,
            reads=(("grad_slot", slot),),
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

    def _grad_slot(self, block: int, piece: int = 0) -> SlotId | None:
        slots = self.places[block].grad_slots
        return slots[piece] if slots else None

    def _accumulate(
        self,
        block: int,
        reads: list[Resource],
        writes: list[Resource],
        *,
        adds: bool,
        piece: int = 0,
    ) -> None:
        if (grad_slot := self._grad_slot(block, piece)) is not None:
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
