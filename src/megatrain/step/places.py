"""The places that a block's bytes pass: slots, rings and buffers, by name or by turn.

Laws (tests/step/test_resources.py)
    1. Layer b lives in slot (b-1) % slots, in forward and in backward, so at the turn the last
       slots layers are where backward needs them.
    2. Embedding and head never take a layer's weight slot. Each has its own. They share the
       gradient slot "edge"; if they are tied, the table's gradient stays in "edge" from the first
       HEAD to DRAIN(0), the head's parts first, and the head's other params use "head".
       The embedding by rows takes turns with the layers instead, unless a trained head has room
       for them.
    3. The rings of tape, gradients, host gradients and the tier restart in each step, so all steps
       of a shape are the same ops.
    4. Where compute shares the host's memory, embedding and head add up in their places of the
       ring, which no layer uses. Layers drain into theirs.
    5. Between disk and update layers take turns in update order. Embedding and head, often the
       largest blocks, share the tier slot "edge": one is the first to be updated, the other the
       last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from megatrain.step.ops import Resource, Role, SlotId
from megatrain.step.shape import StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlaces:
    """The places that the bytes of one block pass on their way."""

    role: Role
    slot: SlotId | None
    """None: never fetched, compute reads the store."""
    weights: Resource
    """Weights that compute reads: the slot, or the store itself."""
    grad_slot: SlotId | None
    """None: frozen."""
    host_grad: SlotId | None
    """None: frozen, or the gradient has its own place, grad[b]."""
    drained: Resource
    """The place of the gradient on the host: grad[b], or the ring."""
    adds_in_ring: bool
    """Whether compute adds the gradient up in that place of the ring."""
    tier_slot: SlotId | None
    """None: frozen, or masters and moments stay in host memory."""
    master: Resource
    """Memory that an update works in: master[b], or the ring between it and the disk."""


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
    in_ring = shape.updates_in_backward
    return [
        BlockPlaces(
            role=shape.role(block),
            slot=slots[block] if shape.copying else None,
            weights=("slot", slots[block]) if shape.copying else ("weights", block),
            grad_slot=grad_slots.get(block),
            host_grad=host_grads[block] if trained and in_ring else None,
            drained=("host_grad", host_grads[block]) if trained and in_ring else ("grad", block),
            adds_in_ring=trained and in_ring and not shape.copying and block not in shape.layers,
            tier_slot=tier_slots[block] if trained and shape.has_tier else None,
            master=("tier_slot", tier_slots[block])
            if trained and shape.has_tier
            else ("master", block),
        )
        for block, trained in enumerate(shape.trained)
    ]


def _grad_slots(shape: StepShape) -> dict[int, SlotId]:
    """Return the gradient slot of each trained block, as backward reaches them."""
    turns = (turn % shape.grad_slots for turn in count())
    slots: dict[int, SlotId] = {}
    for block in reversed(shape.trained_blocks):
        role = shape.role(block)
        if role is Role.HEAD:
            slots[block] = "head" if shape.tied else "edge"
        elif role is Role.EMBEDDING and not shape.rows_take_turns:
            slots[block] = "edge"
        else:
            slots[block] = next(turns)
    return slots
