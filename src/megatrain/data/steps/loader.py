"""Steps made ahead of time by one thread, so that training does not wait for data.

The loader's state is the position after the last step it *gave*, never of one made ahead. A failure
in the thread is raised in the caller, with its own traceback. `close` (or leaving the `with` block)
ends the thread; so does a `seek`, which starts another.

Laws (tests/data/steps/test_loader.py)
    1. A loader gives what `Steps` gives; stopping and seeking loses and repeats nothing.
    2. No thread outlives its loader.
"""

from __future__ import annotations

import queue
import threading

from megatrain.batch import MicroBatch
from megatrain.data.steps.steps import Position, State, Steps
from megatrain.errors import DataError

_AHEAD = 2
_POLL_S = 0.05
_DEADLINE_S = 600.0

_Made = tuple[list[MicroBatch], Position] | BaseException


class Loader:
    """An iterator over steps, each a list of micro-batches: epochs without end."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._position = Position()
        self._maker: _Maker | None = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[MicroBatch]:
        """Return the next step's micro-batches; waits only if none is ready."""
        if self._maker is None:
            self._maker = _Maker(self._steps, self._position)
        made = self._maker.take()
        if isinstance(made, BaseException):
            self.close()
            raise made
        batch, self._position = made
        return batch

    def state(self) -> State:
        """Return where the next step begins, small enough for any checkpoint."""
        return self._steps.state(self._position)

    def seek(self, state: State) -> None:
        """Go to a saved state, at no cost. Raises DataError if it belongs to other data."""
        position = self._steps.position(state)
        self.close()
        self._position = position

    def close(self) -> None:
        """End the thread and drop what it made; the state stays, and iteration may continue."""
        if self._maker is not None:
            self._maker.close()
            self._maker = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Maker:
    """The thread, and the few steps it is ahead."""

    def __init__(self, steps: Steps, position: Position) -> None:
        self._steps = steps
        self._queue: queue.Queue[_Made] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, args=(position,), name="loader")
        self._thread.start()

    def take(self) -> _Made:
        try:
            return self._queue.get(timeout=_DEADLINE_S)
        except queue.Empty:
            raise DataError(f"no batch for {_DEADLINE_S:g} s. Is the disk connected?") from None

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_DEADLINE_S)

    def _make(self, position: Position) -> None:
        try:
            while True:
                batch, position = self._steps.batch(position)
                if not self._put((batch, position)):
                    return
        except BaseException as error:  # the caller gets any of them
            self._put(error)

    def _put(self, made: _Made) -> bool:
        """Queue a step as soon as there is room; False if the loader was closed."""
        # A loader that was never closed must not keep the interpreter from ending.
        while not self._closed.is_set() and threading.main_thread().is_alive():
            try:
                self._queue.put(made, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False
