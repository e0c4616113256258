"""Where compute happens. The only module that may know what kind of device that is.

    CpuDevice(copying=False)   unified memory: nothing is fetched, compute reads the store
    CpuDevice(copying=True)    slots and real copies on a CPU: what an accelerator does, tested here

A device hands out memory and counts it. `keep` counts the memory of a tensor that compute made for
as long as anything uses it, be it a view. A cap turns the count into a law: what would exceed it is
a DeviceFull naming the purpose.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import DeviceFull
from megatrain.memory.ledger import gib

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Meter:
    """Counts live bytes; thread-safe."""

    def __init__(self, cap_bytes: int | None) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._cap_bytes = cap_bytes
        # Reentrant: garbage collected while it is held may be memory that is counted.
        self._lock = threading.RLock()

    def add(self, num_bytes: int, purpose: str) -> None:
        """Count `num_bytes`, or raise DeviceFull if they exceed the cap."""
        with self._lock:
            live = self.live_bytes + num_bytes
            if self._cap_bytes is not None and live > self._cap_bytes:
                raise DeviceFull(
                    f"device memory: {purpose} needs {gib(num_bytes)}, "
                    f"{gib(self._cap_bytes - self.live_bytes)} of {gib(self._cap_bytes)} are free"
                )
            self.live_bytes = live
            self.peak_bytes = max(self.peak_bytes, live)

    def remove(self, num_bytes: int) -> None:
        """Stop counting `num_bytes`."""
        with self._lock:
            self.live_bytes -= num_bytes


class CpuDevice:
    """The CPU as a device."""

    def __init__(self, *, copying: bool = False, cap_bytes: int | None = None) -> None:
        self.copying = copying
        self.meter = Meter(cap_bytes)

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        """Return `num_bytes` as uint8, counted until nothing uses them any more."""
        return self.keep(torch.empty(num_bytes, dtype=torch.uint8), purpose)

    def keep(self, tensor: Tensor, purpose: str) -> Tensor:
        """Count a tensor's memory until nothing uses it any more, and return the tensor."""
        storage = tensor.untyped_storage()
        self.meter.add(storage.nbytes(), purpose)
        weakref.finalize(storage, self.meter.remove, storage.nbytes())
        return tensor

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Copy host bits into device bits or back, on this lane alone."""
        # Not `copy_`: it would start a team of threads that takes cores from compute.
        _integers(target)[...] = _integers(source)

    def to_host(self, source: Tensor, buffer: Tensor | None) -> Tensor:
        """Return a copy of `source` on the host, in `buffer` if it fits."""
        if not self.copying:
            return source
        if buffer is None or _form(buffer) != _form(source):
            buffer = torch.empty_like(source)
        self.fill(buffer, source)
        return buffer

    def to_device(self, source: Tensor) -> Tensor:
        """Return a copy of `source` on the device."""
        if not self.copying:
            return source
        copy = self.keep(torch.empty_like(source), "tape")
        self.fill(copy, source)
        return copy


def _form(tensor: Tensor) -> tuple[object, ...]:
    """Strides too: a layer may compute other bits from a transposed input than from its copy."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _integers(tensor: Tensor) -> np.ndarray:
    """Return the bits, in the tensor's own shape and strides."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()
