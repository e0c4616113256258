"""A lane: a thread with a queue, and on an accelerator a stream.

    host lane (no stream)   waits until the ops it needs are complete, runs the action: the op is
                            issued and complete when the action returns
    device lane (stream)    waits until the ops it needs are issued, makes its stream wait for
                            their events, runs the action, which only queues work on the stream,
                            and records the op's event. With a trace the device's clock is marked
                            before and behind the action, behind the waits

The lane enters its stream for the life of its thread, so an action queues on the right one
without naming it.

Laws (tests/lanes/test_lane.py)
    1. Ops are done one at a time, in the order they were put.
    2. An exception in an action stops all lanes; no op is begun after that.
    3. The thread is not a daemon and is joined by its owner. If forgotten, it does the work it was
       given and ends once the main thread is gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatrain.lanes.progress import Event, Progress, Stopped
from megatrain.lanes.trace import IssuedOp, Span, Trace
from megatrain.step.hazards import Ticket
from megatrain.step.ops import Op

if TYPE_CHECKING:
    from megatrain.lanes.device_clock import DeviceClock, TimedEvent

Action = Callable[[Op], int | None]
"""Runs an op. Returns the bytes it moved, if any."""

IDLE_S = 1.0
"""Interval at which an idle lane looks whether the main thread is still there."""


class Stream(AbstractContextManager[object, None], Protocol):
    """An ordered queue of device work; torch.Stream is one. To enter it makes it current."""

    def record_event(self) -> Event: ...

    def wait_event(self, event: Any) -> None: ...


def no_device() -> None:
    """Set no device: lanes of a CPU have none."""


class Work(NamedTuple):
    """An op on its way through a lane."""

    ticket: Ticket
    waits: list[Ticket]
    action: Action
    step: int


class Lane:
    """One role's ordered work. Made by the caller, started and joined by the player."""

    def __init__(
        self,
        name: str,
        *,
        stream: Stream | None = None,
        clock: DeviceClock | None = None,
        ranges: Callable[[str], AbstractContextManager[object]] | None = None,
        cores: frozenset[int] | None = None,
        set_device: Callable[[], None] = no_device,
    ) -> None:
        """With a `clock` the trace shows when its stream did an op, else when that was issued.

        `ranges` names what the thread does, for a profiler. The thread, and those that it starts,
        run on `cores` only; None: on any. `set_device` is called by each thread before its first
        call of the device: also a lane without a stream asks events of those that have one.
        """
        self.name = name
        self.set_device = set_device
        self._stream = stream
        self._cores = cores
        self._clock = clock
        self._ranges = ranges
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"lane {name}")
        self._progress: Progress
        self._trace: Trace | None

    def start(self, progress: Progress, trace: Trace | None) -> None:
        self._progress = progress
        self._trace = trace
        if trace is None:
            self._clock = None  # nobody would read it
        elif self._clock is not None:
            self._clock.set()
        self._thread.start()

    def put(self, work: Work) -> None:
        """Queue the work; returns at once."""
        self._queue.put(work)

    def join(self, timeout_s: float) -> bool:
        """End the thread once `Progress` is stopped. Returns whether it ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def entered(self) -> AbstractContextManager[object]:
        """Return what a thread that does its ops has entered: its stream, if it has one."""
        return self._stream or nullcontext()

    def act(self, op: Op, action: Action) -> int:
        """Do the op in the caller's thread; return its bytes."""
        with nullcontext() if self._ranges is None else self._ranges(str(op)):
            return action(op) or 0

    def _run(self) -> None:
        at = self._progress.activities[self.name]
        try:
            if self._cores is not None:
                with suppress(OSError):  # cores may have been taken away since they were chosen
                    os.sched_setaffinity(0, self._cores)  # of this thread alone
            self.set_device()
            with self.entered():
                while (work := self._next()) is not None:
                    self._perform(work)
                    at.op = None
        except Stopped:
            pass
        except BaseException as error:
            error.add_note(f"raised in lane {self.name}, at {at.op}")
            self._progress.fail(error)

    def _next(self) -> Work | None:
        while True:
            try:
                work = self._queue.get(timeout=IDLE_S)
            except Empty:
                if threading.main_thread().is_alive():
                    continue
                return None
            return None if self._progress.stopped else work

    def _perform(self, work: Work) -> None:
        ticket, op = work.ticket, work.ticket.op
        at = self._progress.activities[self.name]
        at.op = op
        taken_ns = time.perf_counter_ns()
        for awaited in work.waits:
            self._wait(work, awaited)
        at.awaited, at.since = None, time.monotonic()
        begun = self._mark()
        start_ns = time.perf_counter_ns()
        num_bytes = self.act(op, work.action)
        ended = self._mark()
        if self._stream is not None:
            ticket.event = self._stream.record_event()
        if self._trace is not None:
            end_ns = time.perf_counter_ns()
            span = Span(work.step, self.name, op, start_ns, end_ns, num_bytes)
            if self._clock is not None and begun is not None and ended is not None:
                issued = IssuedOp(span, ticket, work.waits, taken_ns, self._clock, begun, ended)
                self._trace.add_issued(issued)
            else:
                ticket.end_ns = end_ns
                self._trace.add(span)
        self._progress.issue(ticket)

    def _mark(self) -> TimedEvent | None:
        return None if self._clock is None else self._clock.mark(self._stream)

    def _wait(self, work: Work, awaited: Ticket) -> None:
        progress, on_host = self._progress, self._stream is None
        ready = progress.is_complete(awaited) if on_host else progress.is_issued(awaited)
        if not ready:
            at = progress.activities[self.name]
            at.awaited, at.since = awaited, time.monotonic()
            start_ns = time.perf_counter_ns()
            (progress.await_complete if on_host else progress.await_issued)(awaited)
            if self._trace is not None and self._clock is None:
                end_ns = time.perf_counter_ns()
                op = work.ticket.op
                self._trace.add(
                    Span(work.step, self.name, op, start_ns, end_ns, awaited=awaited.op)
                )
        if self._stream is not None and awaited.event is not None:
            self._stream.wait_event(awaited.event)
