"""The progress of lanes: positions, waits, deadlines and failures.

An op is *issued* when its lane has passed it on, and *complete* when its effects are there. On a
lane without a stream that is the same moment. On a lane with one, completion is the device's
business and is read from the op's event. Lanes work in order, so one number per lane is enough.

Laws (tests/lanes/test_progress.py)
    1. A wait ends when its op is there, when everything stops, or by deadline: never otherwise.
    2. The deadline counts from the last progress of *any* lane, device included. A schedule never
       deadlocks (schedule.py), so some lane always moves within the time of its longest op, and
       a long queue is not a stuck one.
    3. The first failure is the one that is raised.
    4. Nobody spins: one thread for each lane looks at the lane's events, while somebody waits, and
       sleeps between two looks; who waits sleeps until it is woken.

A thread that waits for an event is blocked, and nothing reaches it: not that another lane has
failed, nor that the deadline has passed. On CUDA it would not sleep either: an event of torch.Event
spins, on a core of its own and with a lock of the driver that launches need, whatever `blocking`
says. So each lane with a stream has a watcher, a thread that looks now and then, and who waits
sleeps until the watcher, a failure or the deadline wakes it. The pause between looks doubles from
FIRST_PAUSE_S to LONGEST_PAUSE_S: a wait ends at most that much late.

Waking a thread is the cost that counts here (10 us and more), not the lock, which is held for
less than 1 us: each sleeper has its own condition, and only threads that can continue are woken.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from megatrain.errors import LaneTimeout
from megatrain.step.hazards import Ticket
from megatrain.step.ops import Op

FIRST_PAUSE_S = 2e-5
LONGEST_PAUSE_S = 5e-4
"""Some 2,000 looks per second, of a few microseconds each."""


class Event(Protocol):
    """A point in a stream's work; torch.Event is one."""

    def query(self) -> bool:
        """Return whether the device has passed it; never waits."""


class Stopped(Exception):
    """Raised in waits when all lanes stop. Does not leave the lanes."""


@dataclass(slots=True)
class Activity:
    """The state of a lane: inside `op`, or waiting for `awaited` before it, or idle."""

    op: Op | None = None
    awaited: Ticket | None = None
    since: float = 0.0

    def text(self, now: float) -> str:
        if self.op is None:
            return "idle"
        if self.awaited is None:
            return f"inside {self.op} for {now - self.since:.2f} s"
        awaited = f"{self.awaited.op} on lane {self.awaited.lane}"
        return f"before {self.op}, waiting {now - self.since:.2f} s for {awaited}"


@dataclass(slots=True, eq=False)
class _Sleeper:
    ticket: Ticket
    condition: threading.Condition
    until_complete: bool


class Progress:
    """Shared by all lanes of a player and its callers. Every method may be called by any thread."""

    def __init__(
        self,
        lanes: Iterable[str],
        deadline_s: float,
        *,
        set_device: Callable[[], None] = lambda: None,
    ) -> None:
        """`set_device` is called by each watcher's thread, before it asks the device."""
        self.set_device = set_device
        self.failure: BaseException | None = None
        self.stopped = False
        self.activities = {lane: Activity() for lane in lanes}
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._num_issued = dict.fromkeys(self.activities, 0)
        self._on_device: dict[str, deque[Ticket]] = {lane: deque() for lane in self.activities}
        self._sleepers: list[_Sleeper] = []
        self._watchers: dict[str, _Watcher] = {}
        self._moved_at = time.monotonic()

    def begin(self) -> None:
        """Restart the deadline: new work arrives after an idle time."""
        self._moved_at = time.monotonic()

    def issue(self, ticket: Ticket) -> None:
        """Note that the ticket's lane has issued it; wake threads that can continue."""
        with self._lock:
            self._num_issued[ticket.lane] = ticket.number + 1
            self._moved_at = time.monotonic()
            for sleeper in self._sleepers:
                if not sleeper.until_complete and self.is_issued(sleeper.ticket):
                    sleeper.condition.notify()
            if ticket.event is not None:
                self._on_device[ticket.lane].append(ticket)

    def is_issued(self, ticket: Ticket) -> bool:
        return self._num_issued[ticket.lane] > ticket.number

    def is_complete(self, ticket: Ticket) -> bool:
        if not self.is_issued(ticket):
            return False
        if ticket.event is None:
            return True
        with self._lock:
            self._reap(ticket.lane)
            return self._is_passed(ticket)

    def await_issued(self, ticket: Ticket) -> None:
        """Sleep until the ticket is issued. Raises Stopped when everything stops."""
        if self.is_issued(ticket):
            return
        with self._lock:
            self._sleep(ticket, self.is_issued)

    def await_complete(self, ticket: Ticket) -> None:
        """Sleep until the ticket is complete. Raises Stopped when everything stops."""
        self.await_issued(ticket)
        while not self.is_complete(ticket):
            with self._lock:
                watcher = self._watchers.get(ticket.lane)
                if watcher is None:
                    watcher = self._watchers[ticket.lane] = _Watcher(self, ticket.lane)
                watcher.look.notify()
                self._sleep(ticket, self._is_passed, until_complete=True)

    def _sleep(
        self, ticket: Ticket, is_there: Callable[[Ticket], bool], *, until_complete: bool = False
    ) -> None:
        sleeper = _Sleeper(ticket, threading.Condition(self._lock), until_complete)
        self._sleepers.append(sleeper)
        try:
            while not is_there(ticket):
                sleeper.condition.wait(self._time_left())
        finally:
            self._sleepers.remove(sleeper)

    def next_awaited(self, lane: str, look: threading.Condition) -> Ticket | None:
        """Sleep until somebody waits for an op of a lane, and return the first such op.

        None: everything stops.
        """
        with self._lock:
            while not self.stopped:
                awaited = [
                    s.ticket
                    for s in self._sleepers
                    if s.until_complete and s.ticket.lane == lane and not self._is_passed(s.ticket)
                ]
                if awaited:
                    return min(awaited, key=lambda ticket: ticket.number)
                look.wait()
        return None

    def wake(self, lane: str) -> None:
        """Look how far a lane's device has come, and wake who has waited."""
        with self._lock:
            self._reap(lane)

    def join(self, timeout_s: float) -> bool:
        """Wait for the watchers to end, once all is stopped. Returns whether they did in time."""
        until = time.monotonic() + timeout_s
        return all(
            [w.join(max(0.0, until - time.monotonic())) for w in self._watchers.values()]  # noqa: C419
        )

    def fail(self, error: BaseException) -> None:
        """Stop everything because of `error`, unless something else failed before."""
        with self._lock:
            self._stop(error)

    def stop(self) -> None:
        """Stop everything: waits end with Stopped."""
        with self._lock:
            self._stop(None)

    def stuck(self) -> LaneTimeout:
        """Return the error with the position of each lane and the stacks of all threads."""
        now = time.monotonic()
        lanes = [f"  {lane:8} {at.text(now)}" for lane, at in self.activities.items()]
        head = f"no progress for {now - self._moved_at:.2f} s (deadline {self._deadline_s:g} s)"
        return LaneTimeout("\n".join([head, *lanes, *_stacks()]))

    def _stop(self, error: BaseException | None) -> None:
        if not self.stopped:
            self.failure = error
            self.stopped = True
            for sleeper in self._sleepers:
                sleeper.condition.notify()
            for watcher in self._watchers.values():
                watcher.look.notify()

    def _is_passed(self, ticket: Ticket) -> bool:
        """Return whether a ticket is complete, as far as is known."""
        on_device = self._on_device[ticket.lane]
        return self.is_issued(ticket) and (not on_device or on_device[0].number > ticket.number)

    def _time_left(self) -> float:
        if self.stopped:
            raise Stopped
        left = self._moved_at + self._deadline_s - time.monotonic()
        if left <= 0:
            for lane in self._on_device:
                self._reap(lane)
            left = self._moved_at + self._deadline_s - time.monotonic()
        if left <= 0:
            self._stop(self.stuck())
            raise Stopped
        return left

    def _reap(self, lane: str) -> None:
        """Forget the tickets that the device is done with, and wake who has waited for them.

        A thread that looks wakes the others: the watcher may find nobody left to look for.
        """
        on_device = self._on_device[lane]
        while on_device and on_device[0].event.query():
            on_device.popleft()
            self._moved_at = time.monotonic()
        for sleeper in self._sleepers:
            if sleeper.until_complete and self._is_passed(sleeper.ticket):
                sleeper.condition.notify()


class _Watcher:
    """The thread that looks how far the device has come, for those who sleep."""

    def __init__(self, progress: Progress, lane: str) -> None:
        """Made while the lock of `progress` is held."""
        self._progress = progress
        self._lane = lane
        self.look = threading.Condition(progress._lock)
        """Condition to notify when there is a new op to watch."""
        self._thread = threading.Thread(target=self._run, name=f"watcher {lane}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        progress = self._progress
        before: Ticket | None = None
        pause_s = FIRST_PAUSE_S
        try:
            progress.set_device()
            while (ticket := progress.next_awaited(self._lane, self.look)) is not None:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if ticket is before else FIRST_PAUSE_S
                before = ticket
                time.sleep(pause_s)
                if ticket.event.query():  # without the lock, which lanes need to issue their ops
                    progress.wake(self._lane)
        except BaseException as error:
            error.add_note(f"raised while the device was at work for lane {self._lane}")
            progress.fail(error)


def _stacks() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        stacks.append(f"thread {names.get(ident, ident)}, most recent call last:")
        stacks.append("".join(traceback.format_stack(frame)).rstrip())
    return stacks
