"""Plays schedules on lanes.

    with Player([Lane("in"), Lane("compute"), Lane("out"), Lane("host")]) as player:
        step = player.play(ops, actions)      # returns at once
        step.wait(OpKind.HEAD)                  # the losses are there
        following = player.play(ops, actions) # its first ops overlap with the last of `step`
        player.settle()                       # everything is there

Waits are derived as ops come in, so what one list leaves behind the next one waits for, whatever
their shapes. Actions are given with each list: a step's own data travels in their closures.

Laws (tests/lanes/test_player.py)
    1. Any timing of the lanes gives what the reference gives.
    2. An exception in a lane is raised in the caller, with its own traceback, by the call that
       waits or by the next one. No lane is inside an action any more when the caller sees it (a
       stuck lane excepted), and the player takes no more work. Work already queued on a
       stream runs on: synchronize the device before touching anything it uses.
    3. No call waits beyond the deadline without progress. After `close` no thread is left, but a
       watcher (progress.py) while its device hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol, Self

from megatrain.errors import LaneTimeout, PlayerStopped, ScheduleError
from megatrain.lanes.lane import Action, Lane, Work, no_device
from megatrain.lanes.progress import Progress, Stopped
from megatrain.lanes.trace import Trace
from megatrain.step.hazards import Hazards, Ticket
from megatrain.step.ops import Op, OpKind

LANE_DEADLINE_S = 600.0


class Playing(Protocol):
    """A list of ops that is under way, or done."""

    def wait(self, *kinds: OpKind) -> None:
        """Wait until the list's ops of these kinds are complete; of all kinds if none is named."""


class Plays(Protocol):
    """Plays lists of ops, one behind the other: Player on lanes, Reference one at a time."""

    @property
    def trace(self) -> Trace | None:
        """The trace of the played ops, if it is recorded."""

    def play(self, ops: Sequence[Op], actions: Mapping[OpKind, Action]) -> Playing:
        """Do the ops behind all that were played before."""

    def settle(self) -> None:
        """Wait until everything played so far is complete."""

    def close(self) -> None:
        """End what plays. Raises what made it fail, unless a call has raised that before."""


class OnLanes:
    """A list of ops on its way through the lanes."""

    def __init__(self, player: Player, last: dict[OpKind, Ticket]) -> None:
        self._player = player
        self._last = last

    def wait(self, *kinds: OpKind) -> None:
        """Wait until the list's ops of these kinds are complete; of all kinds if none is named."""
        chosen = kinds or tuple(self._last)
        self._player.wait_for(self._last[kind] for kind in chosen if kind in self._last)


class Player:
    """Lanes and the order between them. One caller at a time."""

    def __init__(
        self,
        lanes: Iterable[Lane],
        *,
        deadline_s: float = LANE_DEADLINE_S,
        trace: Trace | None = None,
    ) -> None:
        """Start the lanes. `deadline_s` must exceed the longest single op."""
        self.trace = trace
        self._lanes = {lane.name: lane for lane in lanes}
        # Lanes of one player are of one device.
        self._set_device = next((lane.set_device for lane in self._lanes.values()), no_device)
        self._callers = threading.local()
        self._progress = Progress(self._lanes, deadline_s, set_device=self._set_device)
        self._deadline_s = deadline_s
        self._hazards = Hazards()
        self._last: dict[str, Ticket] = {}
        self._num_played = 0
        self._told = False  # whether the caller knows that the player has stopped
        for lane in self._lanes.values():
            lane.start(self._progress, trace)

    def play(self, ops: Sequence[Op], actions: Mapping[OpKind, Action]) -> OnLanes:
        """Queue the ops behind all played before; returns at once."""
        if self._progress.stopped:
            self._raise_stopped()
        self._require_playable(ops, actions)
        self._give_caller_device()
        if all([self._progress.is_complete(ticket) for ticket in self._last.values()]):  # noqa: C419
            self._progress.begin()
        last: dict[OpKind, Ticket] = {}
        for op in ops:
            ticket, waits = self._hazards.feed(op)
            self._lanes[op.lane].put(Work(ticket, waits, actions[op.kind], self._num_played))
            last[op.kind] = self._last[op.lane] = ticket
        self._num_played += 1
        return OnLanes(self, last)

    def wait_for(self, tickets: Iterable[Ticket]) -> None:
        """Wait until the tickets are complete."""
        self._give_caller_device()
        with suppress(Stopped):
            for ticket in tickets:
                self._progress.await_complete(ticket)
            if self.trace is not None:
                self.trace.collect()
            return
        self._raise_stopped()

    def settle(self) -> None:
        """Wait until everything played so far is complete."""
        self.wait_for(self._last.values())

    def close(self) -> None:
        """Stop the lanes after their current ops and join their threads, within the deadline.

        Raises a lane's error, or LaneTimeout if a thread does not end, unless raised before.
        """
        self._progress.stop()
        all_ended = self._join()
        if self._told:
            return
        self._told = True
        if self._progress.failure is not None:
            raise self._progress.failure
        if not all_ended:
            raise self._progress.stuck()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            if error is None and not self._told:
                self.settle()
        finally:
            self._told = True
            self.close()

    def _require_playable(self, ops: Sequence[Op], actions: Mapping[OpKind, Action]) -> None:
        """Refuse the list before any of its ops starts."""
        for op in ops:
            if op.lane not in self._lanes:
                raise ScheduleError(f"{op} is for lane {op.lane}; the lanes are {[*self._lanes]}")
            if op.kind not in actions:
                raise ScheduleError(f"{op} has no action; the actions are {[*map(str, actions)]}")

    def _give_caller_device(self) -> None:
        """Set the device of the caller's thread, once: it asks events whether they have passed."""
        if not hasattr(self._callers, "has_device"):
            self._set_device()
            self._callers.has_device = True

    def _join(self) -> bool:
        until = time.monotonic() + self._deadline_s
        ended = [lane.join(max(0.0, until - time.monotonic())) for lane in self._lanes.values()]
        return all(ended) and self._progress.join(max(0.0, until - time.monotonic()))

    def _raise_stopped(self) -> NoReturn:
        failure = self._progress.failure
        if failure is None or self._told:
            raise PlayerStopped("the player has stopped; create a new one") from failure
        self._told = True
        if not isinstance(failure, LaneTimeout):
            self._join()
        raise failure
