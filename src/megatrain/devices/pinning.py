"""Host memory that a device copies to and from at full speed, or the way around.

An arena is registered in place, in pieces and in parallel: the driver touches and locks every page,
which takes minutes for a terabyte on one core. A copy may not cross from one piece into the next,
so copies are cut there.

Where the system refuses (memlock limits, containers, devices without registration), copies go
through a ring of small pinned buffers: the lane's thread moves bytes between arena and ring while
the device moves others. That is correct but slower, and reported once.

Laws (tests/devices/test_pinning.py)
    1. Exactly the arena's bytes are registered, each once, or none of them.
    2. A refusal at any piece leaves nothing registered of that arena, and copies exact.
    3. A staged copy reuses no buffer that the device still uses.
"""

from __future__ import annotations

import bisect
import math
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from megatrain.devices.device import copy_bits
from megatrain.devices.runtime import PinningFailed, Runtime
from megatrain.memory.ledger import gib

PIECE_BYTES = 1 << 30
NUM_THREADS = 8
RING_BUFFERS = 3
RING_BUFFER_BYTES = 32 << 20


class Registry:
    """Which host memory is registered."""

    def __init__(self, runtime: Runtime, piece_bytes: int = PIECE_BYTES) -> None:
        self._runtime = runtime
        self._piece_bytes = piece_bytes
        self._starts: list[int] = []
        self._stops: dict[int, int] = {}

    def register(self, arena: Tensor) -> None:
        """Register the entire arena. Raises PinningFailed, and then none of it is registered."""
        first, end = arena.data_ptr(), arena.data_ptr() + arena.nbytes
        starts = range(first, end, self._piece_bytes)
        done: list[int] = []

        def register(start: int) -> None:
            self._runtime.register(start, min(self._piece_bytes, end - start))
            done.append(start)

        try:
            with ThreadPoolExecutor(NUM_THREADS) as threads:
                list(threads.map(register, starts))
        except BaseException:
            for start in done:
                self._runtime.unregister(start)
            raise
        for start in starts:
            bisect.insort(self._starts, start)
            self._stops[start] = min(start + self._piece_bytes, end)

    def unregister(self, arena: Tensor) -> None:
        """Unregister the registered parts of the arena.

        Call it before unmapping: a later mapping at the same addresses could not be registered.
        """
        first = bisect.bisect_left(self._starts, arena.data_ptr())
        last = bisect.bisect_left(self._starts, arena.data_ptr() + arena.nbytes)
        for start in self._starts[first:last]:
            self._runtime.unregister(start)
            del self._stops[start]
        del self._starts[first:last]

    def pieces(self, tensor: Tensor) -> list[slice] | None:
        """Return where to cut a flat host tensor of bytes; None if it is not registered."""
        cuts, at = [], tensor.data_ptr()
        first, end = at, at + tensor.nbytes
        while at < end:
            number = bisect.bisect_right(self._starts, at) - 1
            stop = self._stops[self._starts[number]] if number >= 0 else 0
            if stop <= at:
                return None
            cuts.append(slice(at - first, min(stop, end) - first))
            at = stop
        return cuts

    def close(self) -> None:
        """Unregister everything."""
        for start in self._starts:
            with suppress(PinningFailed):
                self._runtime.unregister(start)
        self._starts.clear()
        self._stops.clear()


class Ring:
    """A few pinned buffers that one lane's copies go through in turn."""

    def __init__(self, runtime: Runtime, buffer_bytes: int = RING_BUFFER_BYTES) -> None:
        self._runtime = runtime
        self._buffers = [runtime.pinned(buffer_bytes) for _ in range(RING_BUFFERS)]
        self._events: list[object | None] = [None] * RING_BUFFERS
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def send(self, target: Tensor, source: Tensor) -> None:
        """Copy host bytes to the device; the bytes of `source` are read when this returns."""
        for span in self._spans(source):
            number, buffer = self._next(span)
            copy_bits(buffer, source[span])
            target[span].copy_(buffer, non_blocking=True)
            self._events[number] = self._runtime.current_stream().record_event()

    def receive(self, target: Tensor, source: Tensor) -> None:
        """Copy device bytes to the host; they are there when this returns."""
        waiting: list[tuple[int, Tensor, slice]] = []
        for span in self._spans(source):
            if len(waiting) == RING_BUFFERS:
                self._unload(target, *waiting.pop(0))
            number, buffer = self._next(span)
            buffer.copy_(source[span], non_blocking=True)
            self._events[number] = self._runtime.current_stream().record_event()
            waiting.append((number, buffer, span))
        for part in waiting:
            self._unload(target, *part)

    def _next(self, span: slice) -> tuple[int, Tensor]:
        """Return the next buffer, cut to the span, once the device is done with it."""
        number = self._turn
        self._turn = (number + 1) % RING_BUFFERS
        self._await(number)
        return number, self._buffers[number][: span.stop - span.start]

    def _unload(self, target: Tensor, number: int, buffer: Tensor, span: slice) -> None:
        self._await(number)
        copy_bits(target[span], buffer)

    def _await(self, number: int) -> None:
        event = self._events[number]
        if event is not None:
            event.synchronize()  # type: ignore[attr-defined]
            self._events[number] = None

    def _spans(self, tensor: Tensor) -> Iterator[slice]:
        size = self._buffers[0].nbytes
        for number in range(math.ceil(tensor.nbytes / size)):
            yield slice(number * size, min((number + 1) * size, tensor.nbytes))


def tell(name: str, arena: Tensor, error: PinningFailed, ring_bytes: int) -> None:
    """Warn once about memory that could not be pinned, with the cost and the way out."""
    warnings.warn(
        f"host memory: {gib(arena.nbytes)} of {name} cannot be pinned ({error}); its copies use "
        f"{gib(ring_bytes)} of pinned buffers, with one more pass over host memory each. "
        "Raise `ulimit -l` (memlock) to avoid it.",
        stacklevel=2,
    )
