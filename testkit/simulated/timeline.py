"""When streams of the simulator are done with their work, on the clock of the host.

Work takes no time there, unless a stream is told to sleep: it is then done that much later, and so
is all that waits for it, on other streams and on the host. No thread sleeps for it. Times are sums,
not measured: a busy machine changes none of them.
"""

from __future__ import annotations

import time
from typing import Protocol


class Timeline:
    """The time of one stream."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def now(self) -> float:
        """Return when the stream is done with all that it was given so far."""
        self._free_s = max(self._free_s, time.perf_counter())
        return self._free_s

    def sleep(self, seconds: float) -> None:
        """Let the stream do nothing for so long."""
        self._free_s = self.now() + seconds

    def follow(self, at_s: float) -> None:
        """Let it wait for what another stream has done by then."""
        self._free_s = max(self._free_s, at_s)


class Timed(Protocol):
    """A stream."""

    timeline: Timeline


class SimTimedEvent:
    """Fits megatrain.lanes.device_clock.TimedEvent. Orders nothing, tells nothing."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def record(self, stream: Timed) -> None:
        self.at_s = stream.timeline.now()

    def query(self) -> bool:
        return time.perf_counter() >= self.at_s

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.0005)

    def elapsed_time(self, end_event: SimTimedEvent) -> float:
        return 1e3 * (end_event.at_s - self.at_s)
