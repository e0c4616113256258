"""Waits between ops, derived from the resources that they read and write.

    read after write     a reader waits for the last writer
    write after read     a writer waits for all who read since
    write after write    a writer waits for the last writer

`Hazards` remembers the last writer and the readers since of every resource, over as many steps
as are fed to it, whatever their shapes: the next step finds the state that one step leaves.

Laws (tests/step/test_hazards.py)
    1. Any two ops that conflict are ordered by lane order and waits, as they were fed.
    2. An op waits for at most one op of each other lane, and none of its lane: lanes are in order.
    3. No op waits for an op that an earlier op of its lane has waited for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from megatrain.step.ops import Op, Resource


@dataclass(slots=True, eq=False)
class Ticket:
    """One op in one play of a schedule: the `number`-th op of its lane since the beginning."""

    op: Op
    lane: str
    number: int
    event: Any = None
    """Set when a lane with a stream issues the op: passes when the device has done it."""
    end_ns: int = 0
    """When it was done, by time.perf_counter_ns, if that is traced and known by now."""


class Hazards:
    """The ordering of all ops fed to it so far. Not thread-safe: one feeder."""

    def __init__(self) -> None:
        self._writer: dict[Resource, Ticket] = {}
        self._readers: defaultdict[Resource, dict[str, Ticket]] = defaultdict(dict)
        self._num_fed: defaultdict[str, int] = defaultdict(int)
        self._waited: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def feed(self, op: Op) -> tuple[Ticket, list[Ticket]]:
        """Return the op's ticket and the tickets, at most one per other lane, it must wait for."""
        lane = op.lane
        ticket = Ticket(op, lane, self._num_fed[lane])
        self._num_fed[lane] += 1
        waited = self._waited[lane]
        waits: dict[str, Ticket] = {}

        for other in self._conflicts(op):
            if other.lane != lane and other.number > waited.get(other.lane, -1):
                waited[other.lane] = other.number
                waits[other.lane] = other

        for resource in op.reads:
            self._readers[resource][lane] = ticket
        for resource in op.writes:
            self._writer[resource] = ticket
            self._readers.pop(resource, None)
        return ticket, list(waits.values())

    def _conflicts(self, op: Op) -> list[Ticket]:
        found = []
        for resource in op.reads + op.writes:
            if resource in self._writer:
                found.append(self._writer[resource])
        for resource in op.writes:
            if resource in self._readers:
                found.extend(self._readers[resource].values())
        return found
