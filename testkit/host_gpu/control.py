"""What tests ask of the device and tell it, beside what a real one offers."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from testkit.host_gpu import module
from testkit.host_gpu.library import LIBRARY

Timing = Literal["early", "lazy", "random"]
TIMINGS: tuple[Timing, ...] = ("early", "lazy", "random")
_COUNTERS = ("tasks", "waits", "silent_waits", "unshaped_ops", "late_frees", "full_queues")


def set_timing(timing: Timing = "early", *, link_bytes_per_s: float | None = None) -> None:
    """Say when streams work: at once, only when somebody asks, or after a while by chance.

    With a rate of the link, each copy between host and device lasts so long.
    """
    probability, most_us = (0.2, 300) if timing == "random" else (0.0, 0)
    ns_per_byte = 1e9 / link_bytes_per_s if link_bytes_per_s else 0.0
    LIBRARY.timing(int(timing == "lazy"), probability, most_us, ns_per_byte)


@contextmanager
def timed(timing: Timing, *, link_bytes_per_s: float | None = None) -> Iterator[None]:
    set_timing(timing, link_bytes_per_s=link_bytes_per_s)
    try:
        yield
    finally:
        set_timing()


@contextmanager
def present(shown: bool = True) -> Iterator[None]:
    """Let torch find the device inside, or not; afterwards it is as it was."""
    before = module.device_count() > 0
    module.show(shown)
    try:
        yield
    finally:
        module.show(before)


@contextmanager
def integrated() -> Iterator[None]:
    """Let the device be in one memory with the host.

    Its free memory is the host's, it reads memory that is not pinned as late as it likes, and its
    kernels work on registered memory as on its own.
    """
    module.integrate(True)
    try:
        yield
    finally:
        module.integrate(False)


@contextmanager
def without_registration() -> Iterator[None]:
    """Let torch offer no way to register host memory for the device, as for Intel's."""
    cudart = module.cudart
    del module.cudart
    try:
        yield
    finally:
        module.cudart = cudart


def start_anew() -> None:
    """Put the device into the state of a new process, for this thread."""
    set_timing()
    LIBRARY.synchronize()
    LIBRARY.forget_faults()
    LIBRARY.refuse_at(0)
    LIBRARY.forbid_waits(0)
    for device in range(int(LIBRARY.device_count())):
        LIBRARY.cap(device, 1.0)
        if torch.accelerator.memory_allocated(device):  # a new process has none: not even cycles
            gc.collect()
        torch.accelerator.reset_peak_memory_stats(device)
    torch.accelerator.set_device_index(0)
    torch.accelerator.empty_cache()


def counters() -> dict[str, int]:
    """Return what was counted since the library was loaded.

    tasks: queued on streams. waits: of the host for the device. silent_waits: by copies to or from
    memory that is not pinned. unshaped_ops: done with a wait, since nobody knew their shape.
    late_frees: pinned buffers dropped while a copy was under way. full_queues: waits of the host
    because a stream had a thousand tasks before it.
    """
    return {name: int(LIBRARY.counter(number)) for number, name in enumerate(_COUNTERS)}


def unshaped_ops() -> dict[str, int]:
    """Return which ops made the host wait because nobody knew their shape beforehand."""
    size = LIBRARY.unshaped_ops(None, 0) + 4096
    text = ctypes.create_string_buffer(size)
    LIBRARY.unshaped_ops(text, size)
    pairs = (line.rsplit(" ", 1) for line in text.value.decode().splitlines())
    return {name: int(count) for name, count in pairs}


def registered_bytes() -> int:
    """Return how much host memory is registered."""
    return int(LIBRARY.registered_bytes())


def refuse_registration_at(number: int) -> None:
    """Refuse the registration of this number from now on; 0 refuses none."""
    LIBRARY.refuse_at(number)
