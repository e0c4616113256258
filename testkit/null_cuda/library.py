"""What the null device has counted, asked by a program that runs on it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass

WAITS = frozenset(
    {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"}
)
"""Calls that return when the device has done something."""
LAUNCHES = frozenset({"launch", "launch of Triton", "product"})


@dataclass(frozen=True, slots=True)
class Call:
    """Calls of one kind, by one thread, with one device."""

    name: str
    thread: str
    device: int
    was_set: bool
    """Whether the thread ever set its device before."""
    count: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted since `forget`."""

    calls: tuple[Call, ...]
    streams: dict[str, frozenset[str]]
    """The threads that queued work on each stream."""

    def of(self, *names: str) -> int:
        """Return how often these were called, by all threads."""
        return sum(call.count for call in self.calls if call.name in names)

    @property
    def host_waits(self) -> int:
        """How often a lane waited for the device."""
        return sum(
            call.count
            for call in self.calls
            if call.name in WAITS and call.thread.startswith("lane ")
        )

    @property
    def pageable_copies(self) -> int:
        """Copies of host memory that the driver does not know: it stages them, and waits."""
        return self.of("pageable copy in", "pageable copy out")

    def foreign_calls(self, device: int) -> int:
        """Return the calls of other devices, and of threads that never set one.

        The first device is current in a thread that never set one, and torch leaves it at that.
        """
        return sum(
            call.count
            for call in self.calls
            if call.device != device or (device != 0 and not call.was_set)
        )

    @property
    def shared_streams(self) -> int:
        """Streams on which several threads queued work: one waits behind the other."""
        return sum(len(threads) > 1 for threads in self.streams.values())

    @property
    def launches(self) -> int:
        return self.of(*LAUNCHES)


def forget() -> None:
    """Begin to count anew."""
    _library().null_cuda_forget()


def counts() -> Counts:
    """Return what was counted. Threads that have ended since have a number in place of a name."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    calls, streams = [], dict[str, frozenset[str]]()
    for words in _report():
        if len(words) == 2:
            stream, thread = words
            streams[stream] = streams.get(stream, frozenset()) | {names.get(thread, thread)}
        else:
            name, thread, device, was_set, count = words
            place = names.get(thread, thread)
            calls.append(Call(name, place, int(device), was_set == "1", int(count)))
    return Counts(tuple(calls), streams)


def driver_peak_bytes(device: int) -> int:
    """Return the most memory that the driver has given of a device."""
    found: int = _library().null_cuda_peak_bytes(device)
    return found


def _report() -> Iterator[list[str]]:
    report = _library().null_cuda_report
    report.restype = ctypes.c_char_p
    for line in report().decode().splitlines():
        yield line.split("\t")


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)  # it was loaded before all others
    library.null_cuda_peak_bytes.restype = ctypes.c_size_t
    return library
