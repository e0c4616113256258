"""One action of a step, as data.

An op names its lane, and every place it reads or writes. A place is a tuple: a family and where in
it. Nothing else in the engine orders ops: waits are derived from these declarations (hazards.py),
so an action may touch only the places that its op declares.

    on the host    weights[b]     weights of block b: fetched from here, read from here by others
                   master[b]      its master and moments, or where they are on disk
                   tier_slot[k]   ring between an update and the disk: masters and moments
                   grad[b]        its gradient; after MOMENTUM(b) the direction of its matrices, and
                                  after RETURN(b) that direction orthogonalized
                   host_grad[j]   ring of gradients that have no grad[b]
                   norm[b]        squared norm of that gradient; finite exactly if all of it is
                   clip           the factor for all gradients of the step
    on the device  slot[k]        weights of the block that is computed
                   grad_slot[j]   the gradient that is being added up, or a direction on its way
                   hidden[m]      output of the block before, for micro-batch m
                   dhidden[m]     gradient of it
                   loss[m]
                   routing        what the routers of all layers have done with the step's tokens,
                                  and after BALANCE those of all ranks
                   tape_slot[r]   ring between compute and a tape on the host
                   kept[b,m]      the activations of layer b, where they stay until backward
    on either      tape[b,m]      the saved input of layer b

A program does not say in which of these places a thing is, for that depends on the features of a
step. It names things, and `Op.place` tells an action where the thing is that its op works on:

    fetched[b]       weights that compute reads                  slot[k], or weights[b] themselves
    grad_sum[b]      its gradient as it adds up                  grad_slot[j]
    drained_grad[b]  that gradient on the host                   grad[b], or host_grad[j]
    direction[b]     what the device makes of its matrices'      grad_slot[j], or where it drained
    optim_state[b]   what its update works in                    master[b], or tier_slot[k]
    saved_input[b,m] its input, as compute leaves and finds it   tape[b,m], or tape_slot[r]

Everything else is a thing and its own place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from megatrain.errors import ScheduleError

Resource = tuple[str | int, ...]
"""A thing or a place: a family, and where in it."""
SlotId = int | str
"""A slot's number, or the name of one that is kept for the embedding or the head."""
LANE_NAMES: Mapping[str, str] = {
    "in": "link in",
    "comm": "network",
    "compute": "compute",
    "out": "link out",
    "host": "optimizer",
    "disk": "disk",
}
"""The lanes, in the order that data takes through them, and what users call them."""
LANES = tuple(LANE_NAMES)
DEVICE_LANES = ("in", "comm", "compute", "out")
"""Those whose ops a device does; the others work on the host and have no stream."""
LIMITS: Mapping[str, str] = {
    "compute": "compute-bound: only a faster device would help",
    "link in": "link in: weights on their way to the device",
    "link out": "link out: gradients on their way to the host",
    "tape": "tape: block inputs on the link",
    "network": "network: weights and gradients between the ranks",
    "optimizer": "optimizer: updates at the speed of host memory",
    "disk": "disk: optimizer states on their way to an update and back",
    "host": "host: it issues work slower than the device does it; larger micro-batches help",
}
"""Limits of a step, and the sentence that explains each."""
PARTS: Mapping[str, str] = {
    "compute": "compute",
    "fetch": "fetching weights",
    "gather": "waiting for other ranks",
    "drain": "draining gradients",
    "update": "updating weights",
    "issue": "issuing work to the device",
}
"""The parts into which the time of a step is split, and the work of each."""


class OpKind(StrEnum):
    """The kinds of op."""

    FETCH = "fetch"  # weights of a block into its slot
    GATHER = "gather"  # the parts of other ranks into that slot
    RESTORE = "restore"  # a block input from the host tape into the ring
    FORWARD = "forward"
    HEAD = "head"  # loss and its gradient
    BALANCE = "balance"  # what the routers of all ranks have done, added up
    BACKWARD = "backward"  # backward, behind a recompute where activations were not kept
    STASH = "stash"  # a block input from the ring to the host tape
    EXCHANGE = "exchange"  # gradients of all ranks, summed: each gets the part that it owns
    DRAIN = "drain"  # gradient of a block to the host
    NORM = "norm"  # squared norm of a drained gradient
    CLIP = "clip"  # norms into one factor
    MOMENTUM = "momentum"  # gradients of a layer's matrices into directions
    SEND = "send"  # directions to the device
    COLLECT = "collect"  # the parts of other ranks to those
    ORTHOGONALIZE = "orthogonalize"  # directions, as whole matrices
    RETURN = "return"  # directions back to the host
    UPDATE = "update"  # master, moments and weights of a block
    READ = "read"  # master and moments of a block from disk
    WRITE = "write"  # master and moments of a block back to disk

    @property
    def spec(self) -> OpSpec:
        return SPECS[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """Everything about a kind of op except its action and its cost.

    The plan and the step's metrics read it here. A new kind needs a line in SPECS, a pass that
    puts it into the list (passes.py), its action and its cost.
    """

    lane: str
    limit: str
    """The limit of a step that waits for ops of this kind: one of LIMITS."""
    part: str
    """The part of a step's time that waiting for it counts as: one of PARTS."""
    ends_step: bool = True
    """Whether a step's losses and norms are known only after it."""


SPECS: Mapping[OpKind, OpSpec] = {
    OpKind.FETCH: OpSpec(lane="in", limit="link in", part="fetch"),
    OpKind.GATHER: OpSpec(lane="comm", limit="network", part="gather"),
    OpKind.RESTORE: OpSpec(lane="in", limit="tape", part="fetch"),
    OpKind.FORWARD: OpSpec(lane="compute", limit="compute", part="compute"),
    OpKind.HEAD: OpSpec(lane="compute", limit="compute", part="compute"),
    OpKind.BALANCE: OpSpec(lane="comm", limit="network", part="gather"),
    OpKind.BACKWARD: OpSpec(lane="compute", limit="compute", part="compute"),
    OpKind.STASH: OpSpec(lane="out", limit="tape", part="drain"),
    OpKind.EXCHANGE: OpSpec(lane="comm", limit="network", part="gather"),
    OpKind.DRAIN: OpSpec(lane="out", limit="link out", part="drain"),
    OpKind.NORM: OpSpec(lane="host", limit="optimizer", part="update"),
    OpKind.CLIP: OpSpec(lane="host", limit="optimizer", part="update"),
    OpKind.MOMENTUM: OpSpec(lane="host", limit="optimizer", part="update", ends_step=False),
    OpKind.SEND: OpSpec(lane="in", limit="link in", part="update", ends_step=False),
    OpKind.COLLECT: OpSpec(lane="comm", limit="network", part="gather", ends_step=False),
    OpKind.ORTHOGONALIZE: OpSpec(lane="compute", limit="compute", part="update", ends_step=False),
    OpKind.RETURN: OpSpec(lane="out", limit="link out", part="update", ends_step=False),
    OpKind.UPDATE: OpSpec(lane="host", limit="optimizer", part="update", ends_step=False),
    OpKind.READ: OpSpec(lane="disk", limit="disk", part="update", ends_step=False),
    OpKind.WRITE: OpSpec(lane="disk", limit="disk", part="update", ends_step=False),
}


class Role(StrEnum):
    """The use of a block."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One action. The same op is played again in every step of its shape."""

    kind: OpKind
    lane: str = ""
    """Empty means the usual lane of its kind."""
    block: int | None = None
    role: Role | None = None
    """The role of that block."""
    micro: int | None = None
    adds: bool = False
    """True: adds to what its gradient slot holds. False: overwrites it."""
    trains: bool = True
    """False: an evaluation, which wants no gradients."""
    passes_gradient: bool = False
    """A block below is trained: the gradient of this block's input is wanted."""
    comes_again: bool = False
    """Another op reads the same inputs, so they stay: it belongs to the first of two backwards, or
    gives the leaves of a step in two phases."""
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()
    places: Mapping[Resource, Resource] = field(default_factory=dict, compare=False, repr=False)
    """Where things are. A thing that is not in it is its own place."""

    def __post_init__(self) -> None:
        if not self.lane:
            object.__setattr__(self, "lane", self.kind.spec.lane)

    def place(self, family: str, *where: int | None) -> Resource:
        """Return where a thing is that the op reads or writes: of its block, unless told.

        Raises ScheduleError for a thing that it does not declare.
        """
        place = self._place(family, where)
        if place not in self.reads and place not in self.writes:
            raise ScheduleError(f"{self} declares no {family}, so it may not touch it")
        return place

    def touches(self, family: str, *where: int | None) -> bool:
        """Return whether the op reads or writes a thing: of its block, unless told."""
        place = self._place(family, where)
        return place in self.reads or place in self.writes

    def _place(self, family: str, where: tuple[int | None, ...]) -> Resource:
        numbers = where or (self.block,)
        thing: Resource = (family, *[number for number in numbers if number is not None])
        return self.places.get(thing, thing)

    def __str__(self) -> str:
        where = ",".join(str(number) for number in (self.block, self.micro) if number is not None)
        return f"{self.kind.name}({where})" if where else self.kind.name
