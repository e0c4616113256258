"""Laws of schedules, checked without a tensor.

`check_schedules` plays lists of ops one after the other, as an engine would over several steps,
and raises ScheduleError at the first op that breaks a law:

    facts          every op finds the right block, at the right version, the right inputs and
                   gradients; nothing still needed is overwritten; every gradient is drained once,
                   with all its parts in their order; the tape is empty at the end (oracle.py)
    interleaving   two ops that touch the same thing, one of them writing, are ordered by lane
                   order and derived waits. What they touch is what the meaning touches, not what
                   they declare, so a forgotten declaration is a race that this law reports

Together: any interleaving that lanes can produce gives the facts of the serial program.

Order is tracked by vector clocks: op B comes after op A if B's clock, at A's lane, is beyond A's
number. All of a lane's earlier ops and all that a wait brought along are in the clock.

`check_ranks_meet` plays the lists of several ranks at once. An op that needs all ranks is done when
it is the next one of its lane on all of them: whoever waits for an op that none can come to, or
meets another op there, is stuck.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatrain.errors import ScheduleError
from megatrain.step.hazards import Hazards, Ticket
from megatrain.step.ops import Op, OpKind, Resource
from megatrain.step.shape import StepShape
from testkit.oracle import Meaning, resource_text


def check_schedules(shape: StepShape, schedules: Iterable[Sequence[Op]]) -> None:
    """Raise ScheduleError, naming list and op, unless the chained schedules keep all laws."""
    meaning, hazards, clocks = Meaning(shape), Hazards(), Clocks()
    for number, ops in enumerate(schedules):
        at: Op | str = "the end"
        try:
            meaning.begin(ops)
            for at in ops:
                ticket, waits = hazards.feed(at)
                reads, writes = meaning.play(at)
                clocks.advance(ticket, waits)
                clocks.touch(ticket, reads, writes)
            at = "the end"
            meaning.end(ops)
        except ScheduleError as error:
            raise ScheduleError(f"list {number}, at {at}: {error}") from None


def one_lane_per_kind(ops: Iterable[Op]) -> list[Op]:
    """Return the ops as if each kind had a lane of its own.

    A schedule that passes so leans on no two kinds sharing a lane: its declarations alone order
    it, and a kind can move to another lane (disk, comm) without a new look at its declarations.
    """
    return [replace(op, lane=op.kind.value) for op in ops]


def meets(shape: StepShape, op: Op) -> bool:
    """Return whether an op needs all ranks: on lane comm, or where norms become one."""
    in_backward = shape.update in ("in_backward", "second_backward")
    shares_norm = op.kind is OpKind.NORM and in_backward and not op.comes_again
    return op.lane == "comm" or op.kind is OpKind.CLIP or shares_norm


def check_ranks_meet(shapes: Sequence[StepShape], lives: Sequence[Iterable[Sequence[Op]]]) -> None:
    """Raise ScheduleError unless ranks of these shapes come to the end of their lists.

    `lives` has the chained lists of each rank.
    """
    ranks = [_RankOnLanes(life) for life in lives]
    while any(lane for rank in ranks for lane in rank.lanes.values()):
        moved = False
        for shape, rank in zip(shapes, ranks, strict=True):
            moved |= rank.go_on(shape)
        for lane in ranks[0].lanes:
            waiting = [rank.at(lane) for rank in ranks]
            if all(op is not None for op in waiting) and len(set(map(str, waiting))) == 1:
                for rank in ranks:
                    rank.finish(lane)
                moved = True
        if not moved:
            stuck = [", ".join(rank.first_ops()) for rank in ranks]
            raise ScheduleError(f"ranks wait for each other: {'; '.join(stuck)}")


class _RankOnLanes:
    """One rank's lanes, each with what it has still to do."""

    def __init__(self, life: Iterable[Sequence[Op]]) -> None:
        hazards, self._done = Hazards(), set[Ticket]()
        self.lanes: defaultdict[str, deque[tuple[Ticket, list[Ticket]]]] = defaultdict(deque)
        for ops in life:
            for op in ops:
                self.lanes[op.lane].append(hazards.feed(op))

    def at(self, lane: str) -> Op | None:
        """Return the next op of a lane, if all that it waits for is done."""
        if not self.lanes[lane]:
            return None
        ticket, waits = self.lanes[lane][0]
        return ticket.op if self._done.issuperset(waits) else None

    def finish(self, lane: str) -> None:
        self._done.add(self.lanes[lane].popleft()[0])

    def go_on(self, shape: StepShape) -> bool:
        """Do what needs no other rank, once through the lanes; return whether there was any."""
        moved = False
        for lane in list(self.lanes):
            while (op := self.at(lane)) is not None and not meets(shape, op):
                self.finish(lane)
                moved = True
        return moved

    def first_ops(self) -> list[str]:
        return [str(lane[0][0].op) for lane in self.lanes.values() if lane]


class Clocks:
    """Happens-before, as lanes and waits make it.

    A clock counts, for each *other* lane, how many of its ops are known to be before. Its own
    lane needs no entry: all that is lower in number is before.
    """

    def __init__(self) -> None:
        self._now: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._then: dict[Ticket, dict[str, int]] = {}
        self._writer: dict[Resource, Ticket] = {}
        self._readers: defaultdict[Resource, dict[str, Ticket]] = defaultdict(dict)

    def advance(self, ticket: Ticket, waits: Iterable[Ticket]) -> None:
        """Let the op be the next of its lane, after all it waits for."""
        clock = self._now[ticket.lane]
        for awaited in waits:
            known = self._then[awaited] | {awaited.lane: awaited.number + 1}
            clock = clock | {lane: max(count, clock.get(lane, 0)) for lane, count in known.items()}
        self._now[ticket.lane] = self._then[ticket] = clock

    def touch(self, ticket: Ticket, reads: Iterable[Resource], writes: Iterable[Resource]) -> None:
        """Raise ScheduleError if the op races with one that touched the same before it."""
        for resource in reads:
            self._require_after_writer(ticket, resource)
            self._readers[resource][ticket.lane] = ticket
        for resource in writes:
            self._require_after_writer(ticket, resource)
            for reader in self._readers.pop(resource, {}).values():
                self._require_after(ticket, reader, resource, "read")
            self._writer[resource] = ticket

    def _require_after_writer(self, ticket: Ticket, resource: Resource) -> None:
        if (writer := self._writer.get(resource)) is not None:
            self._require_after(ticket, writer, resource, "written")

    def _require_after(self, ticket: Ticket, other: Ticket, resource: Resource, done: str) -> None:
        known = self._now[ticket.lane].get(other.lane, 0)
        if other.lane != ticket.lane and known <= other.number:
            raise ScheduleError(
                f"may overtake {other.op} on lane {other.lane}, by which "
                f"{resource_text(resource)} is {done}"
            )
