"""One action of a step, as data.

An op names its lane, the device places it uses, and every resource it reads or writes. A
resource is a tuple: a family and where in it. Nothing else in the engine says who waits for
whom: waits are derived from these declarations (hazards.py), so an action may touch what its op
declares and nothing more.

    on the host    weights[b]     what compute sees of block b
                   master[b]      its master and moments
                   grad[b]        its gradient; host_grad[j], a ring, where updates run in backward
                   norm[b]        squared norm of that gradient; finite exactly if all of it is
                   clip           the factor for all gradients of the step
    on the device  slot[k]        weights of the block that visits
                   grad_slot[j]   the gradient that is being added up
                   hidden[m]      output of the block before, for micro-batch m
                   dhidden[m]     gradient of it
                   loss[m]
                   routing        what the routers of all layers have done with the step's tokens
                   tape_slot[r]   ring between compute and a tape on the host
    on either      tape[b,m]      the kept input of layer b
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

Resource = tuple[str | int, ...]
SlotId = int | str
"""A slot's number, or the name of one that is kept for the embedding or the head."""


class OpKind(StrEnum):
    """What an op does. The comments name its lane."""

    FETCH = "fetch"  # in: weights of a block into its slot
    RESTORE = "restore"  # in: a block input from the host tape into the ring
    FORWARD = "forward"  # compute
    HEAD = "head"  # compute: loss and its gradient
    BACKWARD = "backward"  # compute: recompute and backward
    STASH = "stash"  # out: a block input from the ring to the host tape
    DRAIN = "drain"  # out: gradient of a block to the host
    NORM = "norm"  # host: squared norm of a drained gradient
    CLIP = "clip"  # host: norms into one factor
    UPDATE = "update"  # host: master, moments and weights of a block


LANE_OF: Mapping[OpKind, str] = {
    OpKind.FETCH: "in",
    OpKind.RESTORE: "in",
    OpKind.FORWARD: "compute",
    OpKind.HEAD: "compute",
    OpKind.BACKWARD: "compute",
    OpKind.STASH: "out",
    OpKind.DRAIN: "out",
    OpKind.NORM: "host",
    OpKind.CLIP: "host",
    OpKind.UPDATE: "host",
}
LANES = tuple(dict.fromkeys(LANE_OF.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One action. The same op is played again in every step of its shape."""

    kind: OpKind
    lane: str = ""
    """Empty means the usual lane of its kind."""
    block: int | None = None
    micro: int | None = None
    slot: SlotId | None = None
    """Slot of the block's weights; None where compute reads them in the store."""
    grad_slot: SlotId | None = None
    """Where this block's own gradient adds up; None if the block is frozen."""
    tape_slot: int | None = None
    """Ring slot of the layer's input; None when the tape is on the device."""
    host_grad: SlotId | None = None
    adds: bool = False
    """True: adds to what its gradient slot holds. False: overwrites it."""
    trains: bool = True
    """False: an evaluation, which wants no gradients."""
    keeps_input: bool = False
    """The layer's input goes onto the tape."""
    passes_gradient: bool = False
    """A block below is trained: the gradient of this block's input is wanted."""
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()

    def __post_init__(self) -> None:
        if not self.lane:
            object.__setattr__(self, "lane", LANE_OF[self.kind])

    def __str__(self) -> str:
        where = ",".join(str(i) for i in (self.block, self.micro) if i is not None)
        return f"{self.kind.name}({where})" if where else self.kind.name


def resource_text(resource: Resource) -> str:
    """`("tape", 3, 1)` as `tape[3,1]`."""
    family, *where = resource
    return f"{family}[{','.join(map(str, where))}]" if where else str(family)
