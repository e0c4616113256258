"""A simulated stream: a thread that does deferred work in order, as late as it likes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from megatrain.lanes.lane import Action
from megatrain.step.ops import Op
from testkit.patience import HANG_S

_current = threading.local()


class LateEvent:
    """Passes when its stream gets there."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(HANG_S)


class LateStream:
    """Fits megatrain.lanes.lane.Stream. `delay` says how long it dawdles before each piece."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self._delay = delay
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stream")
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def record_event(self) -> LateEvent:
        event = LateEvent()
        self._queue.put(event.passed.set)
        return event

    def wait_event(self, event: LateEvent) -> None:
        def wait() -> None:
            assert event.passed.wait(HANG_S)

        self._queue.put(wait)

    def __enter__(self) -> LateStream:
        _current.stream = self
        return self

    def __exit__(self, *exc: object) -> None:
        del _current.stream

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._delay())
            work()


def deferred(action: Action) -> Action:
    """Return the action as a device would do it: queued on the lane's stream, if it has one."""

    def queue(op: Op) -> int | None:
        stream: LateStream | None = getattr(_current, "stream", None)
        if stream is None:
            return action(op)
        stream.run(lambda: (action(op), None)[1])
        return None

    return queue
