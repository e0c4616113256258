"""Host memory that a device copies to and from at full speed, or the way around.

An arena is registered in place, in pieces and in parallel: the driver locks every page, which takes
minutes for a terabyte on one core. A copy may not cross from one piece into the next, so copies
are cut there.

Where torch registers no memory for a device (XPU), arenas are allocated pinned instead
(accelerator.py), and are one piece each.

Where the system refuses a piece (containers, devices without registration), none that follows is
tried, and copies of those go through a ring of small pinned buffers: threads move bytes between
arena and ring while the device moves others. That is correct but slower, and reported once.

Laws (tests/devices/test_pinning.py)
    1. Exactly the arena's bytes are registered, each once, unless the system refuses.
    2. A refusal at any piece ends the registering, keeps what is registered, and copies exact.
    3. A staged copy reuses no buffer that the device still uses.
    4. All that was registered is unregistered, whatever the driver says to some of it.
"""

from __future__ import annotations

import bisect
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from megatrain.devices.device import copy_bits
from megatrain.devices.runtime import PinningFailed, Runtime
from megatrain.memory.host import num_cores
from megatrain.memory.ledger import gib
from megatrain.progress import byte_progress

PIECE_BYTES = 1 << 30
NUM_THREADS = 8
SHOWN_PIECES = 16
"""Progress is shown for an arena of so many pieces."""
RING_BUFFERS = 3
RING_BUFFER_BYTES = 32 << 20
STAGING_THREADS = 4
"""Threads of a ring: one moves about 10 GB/s, which is less than a link of PCIe 4 does."""
SHARE_BYTES = 1 << 20
"""Less is not worth another thread."""


class Registry:
    """The host memory that is registered, and that which could not be."""

    def __init__(self, runtime: Runtime, piece_bytes: int = PIECE_BYTES) -> None:
        self._runtime = runtime
        self._piece_bytes = piece_bytes
        self._starts: list[int] = []
        self._stops: dict[int, int] = {}
        self._refused: set[int] = set()
        self._allocated: set[int] = set()
        """Pieces that are pinned without us."""

    def note(self, arena: Tensor) -> None:
        """Take an arena that is pinned already: it is one piece, and stays pinned."""
        start = arena.data_ptr()
        if start not in self._stops:
            bisect.insort(self._starts, start)
            self._stops[start] = start + arena.nbytes
            self._allocated.add(start)

    def register(self, name: str, arena: Tensor) -> PinningFailed | None:
        """Register the arena. Returns the first refusal: not all of it is registered then."""
        first, end = arena.data_ptr(), arena.data_ptr() + arena.nbytes
        starts = range(first, end, self._piece_bytes)
        stops = {start: min(start + self._piece_bytes, end) for start in starts}
        done: set[int] = set()
        refusals: list[PinningFailed] = []

        def register(start: int) -> None:
            if refusals:
                return
            try:
                self._runtime.register(start, stops[start] - start)
            except PinningFailed as refusal:
                refusals.append(refusal)
            else:
                done.add(start)
                advance(stops[start] - start)

        try:
            with (
                byte_progress(
                    f"pinning {name}", arena.nbytes, shown=len(starts) >= SHOWN_PIECES
                ) as advance,
                ThreadPoolExecutor(NUM_THREADS) as threads,
            ):
                list(threads.map(register, starts))
        finally:  # whatever else was raised: what is registered is known
            for start in starts:
                bisect.insort(self._starts, start)
                self._stops[start] = stops[start]
            self._refused.update(set(starts) - done)
        return refusals[0] if refusals else None

    def unregister(self, arena: Tensor) -> list[PinningFailed]:
        """Unregister the registered parts of the arena; return what the driver refused.

        Call it before unmapping: a later mapping at the same addresses could not be registered.
        """
        first = bisect.bisect_left(self._starts, arena.data_ptr())
        last = bisect.bisect_left(self._starts, arena.data_ptr() + arena.nbytes)
        return self._forget(first, last)

    def pieces(self, tensor: Tensor) -> list[slice] | None:
        """Return where to cut a flat host tensor of bytes; None if some was never registered."""
        cuts, at = [], tensor.data_ptr()
        first, end = at, at + tensor.nbytes
        while at < end:
            start = self._piece_at(at)
            if start is None:
                return None
            stop = self._stops[start]
            cuts.append(slice(at - first, min(stop, end) - first))
            at = stop
        return cuts

    def was_refused(self, piece: Tensor) -> bool:
        """Return whether copies of memory in one piece must be staged."""
        return self._piece_at(piece.data_ptr()) in self._refused

    def close(self) -> list[PinningFailed]:
        """Unregister everything; return what the driver refused."""
        return self._forget(0, len(self._starts))

    def _piece_at(self, address: int) -> int | None:
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0 or self._stops[self._starts[number]] <= address:
            return None
        return self._starts[number]

    def _forget(self, first: int, last: int) -> list[PinningFailed]:
        starts = self._starts[first:last]
        registered = [start for start in starts if start not in self._refused | self._allocated]
        del self._starts[first:last]
        for start in starts:
            del self._stops[start]
        self._refused.difference_update(starts)
        self._allocated.difference_update(starts)
        if not registered:
            return []
        with ThreadPoolExecutor(NUM_THREADS) as threads:  # the driver unlocks every page
            answers = threads.map(self._unregistered, registered)
            return [answer for answer in answers if answer is not None]

    def _unregistered(self, start: int) -> PinningFailed | None:
        try:
            self._runtime.unregister(start)
        except PinningFailed as refusal:
            return refusal
        return None


class Ring:
    """A few pinned buffers that copies of one direction go through in turn, of any lane."""

    def __init__(self, runtime: Runtime, buffers: Sequence[Tensor]) -> None:
        self._runtime = runtime
        self._buffers = buffers
        self._threads = ThreadPoolExecutor(min(STAGING_THREADS, num_cores()))
        self._events: list[object | None] = [None] * RING_BUFFERS
        self._turn = 0
        self._lock = threading.Lock()

    def send(self, target: Tensor, source: Tensor) -> None:
        """Copy host bytes to the device; the bytes of `source` are read when this returns."""
        for span in self._spans(source):
            with self._lock:
                number, buffer = self._next(span)
                self._move(buffer, source[span])
                target[span].copy_(buffer, non_blocking=True)
                self._events[number] = self._runtime.current_stream().record_event()

    def receive(self, target: Tensor, source: Tensor) -> None:
        """Copy device bytes to the host; they are there when this returns."""
        waiting: list[tuple[int, Tensor, slice]] = []
        with self._lock:
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
        self._move(target[span], buffer)

    def _move(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes on the host, a share in each thread."""
        share = max(SHARE_BYTES, -(-target.nbytes // STAGING_THREADS))
        shares = [slice(at, at + share) for at in range(0, target.nbytes, share)]
        if len(shares) == 1:
            copy_bits(target, source)
            return
        list(self._threads.map(lambda part: copy_bits(target[part], source[part]), shares))

    def _await(self, number: int) -> None:
        event = self._events[number]
        if event is not None:
            event.synchronize()  # type: ignore[attr-defined]
            self._events[number] = None

    def _spans(self, tensor: Tensor) -> Iterator[slice]:
        size = self._buffers[0].nbytes
        for number in range(math.ceil(tensor.nbytes / size)):
            yield slice(number * size, min((number + 1) * size, tensor.nbytes))


class NotPinned(UserWarning):
    """Host memory could not be pinned."""


def tell_refusal(name: str, arena: Tensor, refusal: PinningFailed, ring_bytes: int) -> None:
    """Warn of memory that could not be pinned, with the cost and the way out."""
    warnings.warn(
        f"host memory: not all of {name}, {gib(arena.nbytes)}, can be pinned ({refusal}); the "
        f"copies of the rest use {gib(ring_bytes)} of pinned buffers, with one more pass over host "
        f"memory each. {refusal.advice}.",
        NotPinned,
        stacklevel=2,
    )


def tell_kept(refusals: Sequence[PinningFailed]) -> None:
    """Warn of memory that stays pinned."""
    if refusals:
        warnings.warn(
            f"host memory: {len(refusals)} pieces stay pinned ({refusals[0]}). The system has them "
            "back when this process ends; until then no other engine can pin them.",
            stacklevel=2,
        )
