"""The reference player: one op at a time, in list order, in the caller's thread.

The oracle: no lanes, no waits, no overlap, nothing to get wrong but the schedule and the actions.
It takes the place of a Player, so that a wrong result can be pinned on one or the other.

Laws (tests/lanes/test_reference.py)
    1. When `play` returns, every op has been done, in list order.
    2. An exception leaves `play` as it is; no later op is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatrain.lanes.lane import Action, Lane
from megatrain.lanes.trace import Span, Trace
from megatrain.step.ops import LANES, Op, OpKind


class Done:
    """A list of ops that is done."""

    def wait(self, *kinds: OpKind) -> None:
        """Return at once."""


class Reference:
    """A player without lanes."""

    def __init__(
        self,
        lanes: Iterable[Lane] | None = None,
        *,
        trace: Trace | None = None,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        """Ops run as `lanes` do them, in their streams; no lane is started.

        `synchronize` makes sure, after each op, that a device has done it.
        """
        self._synchronize = synchronize
        self._lanes = {lane.name: lane for lane in lanes or map(Lane, LANES)}
        self.trace = trace
        self._num_played = 0

    def play(self, ops: Sequence[Op], actions: Mapping[OpKind, Action]) -> Done:
        """Do all ops; returns when they are done."""
        for op in ops:
            start_ns = time.perf_counter_ns()
            lane = self._lanes[op.lane]
            with lane.entered():
                num_bytes = lane.act(op, actions[op.kind])
            self._synchronize()
            if self.trace is not None:
                end_ns = time.perf_counter_ns()
                self.trace.add(Span(self._num_played, op.lane, op, start_ns, end_ns, num_bytes))
        self._num_played += 1
        return Done()

    def settle(self) -> None:
        """Return at once: nothing is under way."""

    def close(self) -> None:
        """Return at once: no lane was started."""
