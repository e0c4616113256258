"""The tape: block inputs kept from forward to backward, on the device or on the host.

Where compute shares the host's memory, it is a dictionary of tensors that exist anyway. Where it
does not, an input is copied into room that was reserved before the step: on the device, or in a
ring of a few places from which the out lane copies it away (stash) and into which the in lane
brings it back just before backward needs it (restore). Nothing is allocated during a step.

Laws (tests/engine/test_tape.py)
    1. A tensor is returned bit for bit, with its strides: a layer may compute other bits
       from a transposed input than from its copy.
    2. With the tape on the host, no more inputs are on the device than the ring has places.
    3. Room is allocated by `reserve` alone, and only if a step needs more than any before. On the
       host it has at first what steps were announced to need, and grows by a quarter at least: to
       map and pin tens of gigabytes takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Key = tuple[int, int]
"""A layer's block and a micro-batch."""
ALIGNMENT = 256
HOST_GROWTH = 1.25


class Home(Protocol):
    """The device, as the tape needs it."""

    @property
    def copying(self) -> bool: ...

    def allocate(self, num_bytes: int, purpose: str) -> Tensor: ...

    def map_host(self, num_bytes: int, purpose: str) -> Tensor: ...

    def unmap_host(self, arena: Tensor) -> None: ...

    def copy(self, target: Tensor, source: Tensor) -> None: ...


class _Form(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


class Tape:
    """Inputs by layer and micro-batch. Not thread-safe: the schedule orders its users."""

    def __init__(self, home: Home, *, on_host: bool, num_ring_slots: int) -> None:
        self._home = home
        self._on_host = on_host
        self._num_ring_slots = num_ring_slots
        self._kept: dict[Key, Tensor] = {}
        self._forms: dict[Key, _Form] = {}
        self._device = _Room(lambda size: home.allocate(size, "tape"))
        self._host = _Room(
            lambda size: home.map_host(size, "tape"), home.unmap_host, grows_by=HOST_GROWTH
        )

    def announce(self, num_bytes: int) -> None:
        """Say what the inputs of a step will take in all, where that is known before the first."""
        self._host.announced_bytes = num_bytes

    def reserve(self, layers: Sequence[int], micro_bytes: Sequence[int]) -> None:
        """Make room for the inputs of `layers`, one per micro-batch. Nothing may be under way."""
        if not self._home.copying or not layers or not micro_bytes:
            return
        inputs = {(b, m): size for b in layers for m, size in enumerate(micro_bytes)}
        if self._on_host:
            self._host.reserve(inputs)
            largest = max(micro_bytes)
            self._device.reserve({(-1, slot): largest for slot in range(self._num_ring_slots)})
        else:
            self._device.reserve(inputs)

    def keep(self, key: Key, ring_slot: int | None, hidden: Tensor) -> None:
        """Keep an input: on the device, or in the ring on its way to the host."""
        if not self._home.copying:
            self._kept[key] = hidden
            return
        strides = torch.empty_like(hidden, device="meta").stride()
        self._forms[key] = _Form(hidden.shape, strides, hidden.dtype, hidden.nbytes)
        self._view(key, ring_slot).copy_(hidden)

    def take(self, key: Key, ring_slot: int | None, *, stays: bool = False) -> Tensor:
        """Return an input and forget it, unless it `stays` for another backward."""
        if not self._home.copying:
            return self._kept[key] if stays else self._kept.pop(key)
        view = self._view(key, ring_slot)
        if not stays:
            del self._forms[key]
        # Autograd counts writes per buffer, and the next place of the ring is filled while this one
        # is in use. `data` has its own count.
        return view.data

    def stash(self, key: Key, ring_slot: int) -> int:
        """Copy an input from the ring to the host; return its bytes."""
        if not self._home.copying:
            return 0
        size = self._forms[key].num_bytes
        self._home.copy(self._host.at(key, size), self._device.at((-1, ring_slot), size))
        return size

    def restore(self, key: Key, ring_slot: int) -> int:
        """Copy an input from the host into the ring; return its bytes."""
        if not self._home.copying:
            return 0
        size = self._forms[key].num_bytes
        self._home.copy(self._device.at((-1, ring_slot), size), self._host.at(key, size))
        return size

    def clear(self) -> None:
        """Forget what a failed step left."""
        self._kept.clear()
        self._forms.clear()

    def _view(self, key: Key, ring_slot: int | None) -> Tensor:
        form = self._forms[key]
        place = key if ring_slot is None else (-1, ring_slot)
        flat = self._device.at(place, form.num_bytes).view(form.dtype)
        return flat.as_strided(form.shape, form.strides)


class _Room:
    """One buffer, divided again for each step."""

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        release: Callable[[Tensor], None] = lambda buffer: None,
        grows_by: float = 1.0,
    ) -> None:
        self._allocate = allocate
        self._release = release
        self._grows_by = grows_by
        self.announced_bytes = 0
        self._buffer: Tensor | None = None
        self._starts: dict[Key, int] = {}
        self._sizes: Mapping[Key, int] = {}

    def reserve(self, sizes: Mapping[Key, int]) -> None:
        self._starts, total = dict(_starts(sizes)), sum(map(_padded, sizes.values()))
        self._sizes = sizes
        if self._buffer is None or self._buffer.nbytes < total:
            room = max(total, self.announced_bytes)
            if self._buffer is not None:
                room = max(room, int(self._buffer.nbytes * self._grows_by))
                self._release(self._buffer)
            self._buffer = None  # the old one first: both at once might not fit
            self._buffer = self._allocate(room)

    def at(self, key: Key, num_bytes: int) -> Tensor:
        assert self._buffer is not None
        assert num_bytes <= self._sizes[key], f"{num_bytes} bytes in room for {self._sizes[key]}"
        start = self._starts[key]
        return self._buffer[start : start + num_bytes]


def _starts(sizes: Mapping[Key, int]) -> Iterator[tuple[Key, int]]:
    start = 0
    for key, size in sizes.items():
        yield key, start
        start += _padded(size)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
