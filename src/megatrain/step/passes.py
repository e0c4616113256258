"""What a feature may do to the list of a step, and the tools for it.

A step begins as a plain program (program.py). Each feature is a pass over its list: first it says
where things are, then it rewrites the ops. The list is one of *drafts*: they name things, and only
`placed` makes ops of them, which have places. A pass owns the list while it runs. It may change
drafts, put some in, move or drop them.

A pass finds its way by things, places and marks, and never asks which other features are on. A
mark is in the list and does nothing. It is there even for a rank that has no micro-batch, so no
pass needs a case for that.

    BLOCK_END(b)     no op below needs the weights of b, until they are fetched once more
    START            the step begins; above it are only updates that the step before left
    BACKWARD_START   forward is over, heads follow
    END              every gradient is on its way to the host

Most passes are one of two: `around` puts ops before or behind others, and `stream` brings things to
a place that is too small for all of them, each as early as the place is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from megatrain.step.ops import Op, OpKind, Resource
from megatrain.step.shape import StepShape


class Mark(Enum):
    """The kinds of mark."""

    START = "start"
    BACKWARD_START = "backward start"
    END = "end"
    BLOCK_END = "block end"


@dataclass(slots=True, eq=False)
class Draft:
    """An op under way through the passes, or a mark. Passes change it in place."""

    kind: OpKind | Mark
    block: int | None = None
    micro: int | None = None
    reads: tuple[Resource, ...] = ()
    writes: tuple[Resource, ...] = ()
    adds: bool = False
    trains: bool = True
    passes_gradient: bool = False
    comes_again: bool = False
    left: bool = False
    """A late update, or what belongs to one: the step leaves it to the next one."""
    places: dict[Resource, Resource] | None = None
    """Where things are for this op, if not where they are for all others (Step.places)."""

    def copy(self) -> Draft:
        """Return another op that is the same. (copy.copy takes four times as long.)"""
        return Draft(
            self.kind,
            self.block,
            self.micro,
            self.reads,
            self.writes,
            self.adds,
            self.trains,
            self.passes_gradient,
            self.comes_again,
            self.left,
            self.places,
        )

    def beside(
        self, kind: OpKind, reads: tuple[Resource, ...] = (), writes: tuple[Resource, ...] = ()
    ) -> Draft:
        """Return an op of another kind for the same block and micro-batch, left as this one is."""
        return Draft(
            kind, self.block, self.micro, reads, writes, left=self.left, places=self.places
        )

    def also(self, *, reads: tuple[Resource, ...] = (), writes: tuple[Resource, ...] = ()) -> None:
        """Let the op read and write more."""
        self.reads += reads
        self.writes += writes


@dataclass(slots=True)
class Step:
    """A list under way through the passes."""

    shape: StepShape
    ops: list[Draft]
    places: dict[Resource, Resource] = field(default_factory=dict)
    """Where things are. A thing that is not in it is its own place."""


class Pass:
    """What a feature changes in the list of a step. Both methods may be left out."""

    def places(self, step: Step) -> None:
        """Say where things are. All passes do so before any of them rewrites the list."""

    def ops(self, step: Step) -> Iterable[Draft]:
        """Return the list with what the feature adds to it, changes, moves or drops."""
        return step.ops


def _nothing(op: Draft) -> Iterable[Draft]:
    return ()


def around(
    ops: Iterable[Draft],
    *,
    before: Callable[[Draft], Iterable[Draft]] = _nothing,
    behind: Callable[[Draft], Iterable[Draft]] = _nothing,
) -> Iterator[Draft]:
    """Yield the ops, each between what is to be before it and behind it."""
    for op in ops:
        yield from before(op)
        yield op
        yield from behind(op)


def stream(
    step: Step, family: str, load: Callable[[Resource, Draft], Draft], start: Mark
) -> Iterator[Draft]:
    """Yield the ops with the load of each thing of a family, as early as its place is free.

    An op that reads a thing finds it in its place. A place that still holds it needs no load. The
    first load of a place is at the mark `start`, each other one behind the last op that used the
    place: loads are in the order in which places are freed, so none is stuck behind one whose
    place is freed later.

    The place of embedding or head has a name, and is free most of the time. What it is to hold is
    not loaded before what is needed earlier: it must not delay the layers.
    """
    holds: dict[Resource, Resource] = {}
    last_use: dict[Resource, int] = {}
    loads: dict[int | None, list[Draft]] = {}
    """By the number of the op that they are behind; None: at the start."""
    before: int | None = None
    for index, op in enumerate(step.ops):
        for thing in op.reads:
            if thing[0] != family:
                continue
            place = step.places[thing]
            if holds.get(place) != thing:
                holds[place] = thing
                at = last_use.get(place)
                if isinstance(place[1], str) and before is not None:
                    at = before if at is None else max(at, before)
                before = at
                loads.setdefault(at, []).append(load(thing, op))
            last_use[place] = index
    for index, op in enumerate(step.ops):
        yield op
        for loaded in loads.get(None if op.kind is start else index, ()):
            loaded.left = op.left  # where an op is decides about it, not whose it is
            yield loaded


def placed(step: Step, ops: Iterable[Draft]) -> list[Op]:
    """Return the ops of some drafts of a step, with places for things and without marks."""
    shape, places = step.shape, step.places
    roles = [shape.role(block) for block in range(shape.num_blocks)]
    lanes = {kind: kind.spec.lane for kind in OpKind}
    where, found = places.get, []
    for op in ops:
        kind = op.kind
        if isinstance(kind, Mark):
            continue
        if own := op.places:
            reads = tuple([own.get(thing) or where(thing, thing) for thing in op.reads])
            writes = tuple([own.get(thing) or where(thing, thing) for thing in op.writes])
            known = {thing: places[thing] for thing in op.reads + op.writes if thing in places}
            known |= own
        else:
            reads = tuple([where(thing, thing) for thing in op.reads])
            writes = tuple([where(thing, thing) for thing in op.writes])
            known = places  # one table for all of them
        found.append(
            Op(
                kind=kind,
                lane=lanes[kind],
                block=op.block,
                role=None if op.block is None else roles[op.block],
                micro=op.micro,
                adds=op.adds,
                trains=op.trains,
                passes_gradient=op.passes_gradient,
                comes_again=op.comes_again,
                reads=reads,
                writes=writes,
                places=known,
            )
        )
    return found
