"""The clock of a device: when it did something, on the clock of the host.

    mark      an event that notes the device's time when a stream comes to it
    host_ns   that time as time.perf_counter_ns would have told it

A device tells how long it took from one event to another, and nothing else. So there is a base: an
event whose time on the host is known, because the host waited for it on an idle stream. It is set
again between steps, by who waits for them, so that the two clocks cannot drift apart.

Events are used again once they were read: a steady step creates none. They order nothing. No lane
waits for one.

Laws (tests/lanes/test_device_clock.py)
    1. Times are the device's, on the host's clock.
    2. A steady step creates no event.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol


class TimedEvent(Protocol):
    """An event that notes when its stream comes to it; torch.Event with timing is one."""

    def record(self, stream: Any) -> None:
        """Queue it on the stream."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to another, both passed."""


class Times(Protocol):
    """The source of a device's times: its runtime."""

    def timed_event(self) -> TimedEvent:
        """Return a new event that notes its time."""

    def current_stream(self) -> Any:
        """Return the stream that this thread has entered."""


class DeviceClock:
    """The clock of one device. `set` it before the first mark. Lanes mark, one thread reads."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._free: deque[TimedEvent] = deque()
        self._base: TimedEvent | None = None
        self._base_ns = 0

    def set(self) -> None:
        """Tie the device's clock to the host's; waits for the stream of this thread, an idle one.

        Marks that were not read before have their time before the base.
        """
        self._base = self._base or self._times.timed_event()
        begin_ns = time.perf_counter_ns()
        self._base.record(self._times.current_stream())
        self._base.synchronize()
        # The device passed it somewhere in between: some 10 us, of which we take the middle.
        self._base_ns = (begin_ns + time.perf_counter_ns()) // 2

    def mark(self, stream: Any) -> TimedEvent:
        """Queue an event on the stream that notes its time, and return it."""
        try:
            event = self._free.popleft()
        except IndexError:
            event = self._times.timed_event()
        event.record(stream)
        return event

    def read(self, event: TimedEvent) -> int:
        """Return when the device passed it, as time.perf_counter_ns; it is used again then."""
        assert self._base is not None, "the clock was not set"
        self._free.append(event)
        return self._base_ns + round(1e6 * self._base.elapsed_time(event))
