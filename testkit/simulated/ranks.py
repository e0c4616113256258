"""Ranks as threads of one process, each with a simulated accelerator of its own.

    several = Several()
    with several.watched():
        found = several.run(4, work)       # work(ranks, simulator) as each rank

A collective is a task of a stream (accelerator.py): its rank comes to it, whoever is last moves the
bytes of all, and only then each stream goes on. No thread waits inside, so that lanes of a rank
that waits for another issue their ops all the while, as on a real device.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest import mock

from megatrain.lanes.lane import Action, Lane, Work
from megatrain.lanes.progress import Progress, _Watcher
from megatrain.ranks.ranks import Ranks
from megatrain.step.ops import Op
from testkit.rank_threads import ONE_AT_A_TIME, ThreadWire, Together
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched

Result = TypeVar("Result")
Take = Callable[[list[Any]], Any]


class Meetings:
    """The collectives of all ranks, one after another: who is last does it for all."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._num_met = [0] * size
        self._arrived: dict[int, dict[int, tuple[Any, Take]]] = {}

    def trade(self, rank: int, gives: Any, take: Take) -> Callable[[], bool]:
        """Come to the next one; return what tells whether it is done."""
        with self._lock:
            number = self._num_met[rank]
            self._num_met[rank] += 1
            arrived = self._arrived.setdefault(number, {})
            arrived[rank] = gives, take
            if len(arrived) == self._size:
                given = [arrived[other][0] for other in range(self._size)]
                for other in range(self._size):
                    arrived[other][1](given)
                del self._arrived[number]
        return lambda: number not in self._arrived


class Several:
    """The simulators of all ranks; whoever asks, asks the one of its own rank."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._of_lane: dict[Lane, Simulator] = {}
        self._of_watcher: dict[_Watcher, Simulator] = {}
        self.default = nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local.simulator, name)

    def run(
        self, size: int, simulator_of: Callable[[int], Simulator], work: Callable[..., Result]
    ) -> list[Result]:
        """Do `work(ranks, simulator)` as each rank at once; return their results."""
        together, meetings = Together(size, level=True), Meetings(size)
        for ranks in together.ranks:
            ranks.wire = ThreadWire(ranks.owner, meetings)

        def as_rank(ranks: Ranks) -> Result:
            simulator = self._local.simulator = simulator_of(ranks.owner.rank)
            with simulator.default:
                return work(ranks, simulator)

        # A collection would free memory of one rank, under its lock, in a thread of another.
        gc.disable()
        try:
            return together.run(as_rank)
        finally:
            gc.enable()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let each simulator hear and see its own rank's threads; lanes compute one at a time."""

        def put(lane: Lane, work: Work) -> None:
            self._of_lane[lane] = self._local.simulator
            original_put(lane, work)

        def next_work(lane: Lane) -> Work | None:
            work = original_next(lane)
            if work is not None:
                self._local.simulator = self._of_lane[lane]
            return work

        def act(lane: Lane, op: Op, action: Action) -> int:
            with ONE_AT_A_TIME if lane.name == "compute" else nullcontext():
                return original_act(lane, op, action)

        def made(watcher: _Watcher, progress: Progress, lane: str) -> None:
            self._of_watcher[watcher] = self._local.simulator
            original_made(watcher, progress, lane)

        def watches(watcher: _Watcher) -> None:
            self._local.simulator = self._of_watcher[watcher]
            original_watches(watcher)

        original_put, original_next, original_act = Lane.put, Lane._next, Lane.act
        original_made, original_watches = _Watcher.__init__, _Watcher._run
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(_Watcher, "__init__", made))
            stack.enter_context(mock.patch.object(_Watcher, "_run", watches))
            for name, new in (("put", put), ("_next", next_work), ("act", act)):
                stack.enter_context(mock.patch.object(Lane, name, new))
            stack.enter_context(watched(self))  # type: ignore[arg-type]
            yield
