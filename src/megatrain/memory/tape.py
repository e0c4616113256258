"""The tape: block inputs kept from forward to backward, on the device or on the host.

On the device it is a dictionary of tensors that exist anyway. On the host, compute leaves an input
in a ring slot, the out lane copies it away (stash), the in lane brings it back into a ring slot
just before backward wants it (restore). The ring holds references: its slots bound how many inputs
are on the device at once.

Laws (tests/memory/test_tape.py)
    1. What is taken is what was kept, bit for bit.
    2. With the tape on the host, no more inputs are on the device than the ring has slots.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Key = tuple[int, int]
"""A layer's block and a micro-batch."""


class Mover(Protocol):
    """Copies between host and device, for the lane that calls it."""

    def to_host(self, source: Tensor, buffer: Tensor | None) -> Tensor:
        """Return a copy of `source` on the host, in `buffer` if it fits."""

    def to_device(self, source: Tensor) -> Tensor:
        """Return a copy of `source` on the device."""


class Tape:
    """Inputs by layer and micro-batch. Not thread-safe but where the schedule orders its users."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._on_device: dict[Key, Tensor] = {}
        self._on_host: dict[Key, Tensor] = {}
        self._spare: dict[Key, Tensor] = {}
        self._ring: dict[int, Tensor] = {}

    def keep(self, key: Key, ring_slot: int | None, hidden: Tensor) -> None:
        """Keep an input: on the device, or in the ring on its way to the host."""
        if ring_slot is None:
            self._on_device[key] = hidden
        else:
            self._ring[ring_slot] = hidden

    def take(self, key: Key, ring_slot: int | None) -> Tensor:
        """Return an input and forget it."""
        return self._on_device.pop(key) if ring_slot is None else self._ring.pop(ring_slot)

    def stash(self, key: Key, ring_slot: int) -> int:
        """Copy an input from the ring to the host; return its bytes."""
        hidden = self._ring.pop(ring_slot)
        self._on_host[key] = self._mover.to_host(hidden, self._spare.pop(key, None))
        return hidden.nbytes

    def restore(self, key: Key, ring_slot: int) -> int:
        """Copy an input from the host into the ring; return its bytes."""
        buffer = self._on_host.pop(key)
        hidden = self._ring[ring_slot] = self._mover.to_device(buffer)
        if hidden is not buffer:  # a copy: the buffer can serve the next step
            self._spare[key] = buffer
        return buffer.nbytes

    def clear(self) -> None:
        """Forget what a failed step left."""
        for inputs in (self._on_device, self._on_host, self._ring):
            inputs.clear()
