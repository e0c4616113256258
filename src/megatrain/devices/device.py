"""The device interface of the engine, and its implementation for the CPU.

    CpuDevice(copying=False)   unified memory: nothing is fetched, compute reads the store
    CpuDevice(copying=True)    slots and real copies on a CPU: what an accelerator does, tested here
    AcceleratorDevice          a device with its own memory and streams (accelerator.py)
    Coherent                   a device with streams that shares the host's memory (accelerator.py)

A device hands out memory and counts it. `counted` counts the memory of a tensor that compute made
for as long as anything uses it, be it a view. A cap turns the count into a law: an allocation that
would exceed it raises OutOfDeviceMemory, which names the purpose.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import OutOfDeviceMemory
from megatrain.lanes.lane import Lane, Stream
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.host import num_cores
from megatrain.memory.ledger import gib
from megatrain.memory.placement import Placement
from megatrain.step.ops import LANES
from megatrain.step.settings import PART_ELEMENTS

_OUT_OF_MEMORY = re.compile(
    r"CU\w+_STATUS_ALLOC_FAILED"  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_NOT_INITIALIZED.*\w+Create"  # no room for a handle
    r"|CUDNN_STATUS_\w*(DEVICE|HOST)_ALLOCATION_FAILED"
    r"|\b[A-Z]+ (driver )?error: out of memory"
    # The allocator asks NVML who holds the memory, for its message. Without NVML (MIG, Jetson, some
    # containers) that question fails in place of the allocation.
    r"|NVML_SUCCESS == [^\n]+ INTERNAL ASSERT FAILED at \S*CUDACachingAllocator"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|ROCBLAS_STATUS_MEMORY_ERROR"
    r"|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)",
    re.DOTALL,
)
"""Texts of libraries that allocate by themselves (cuBLAS and cuDNN when they make a handle or a
workspace), of drivers, and of the allocator of pinned host memory."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Device(Protocol):
    """Memory, copies and lanes. Calls inside an op are queued on the lane's stream."""

    @property
    def name(self) -> str:
        """Name in torch: `cpu`, `cuda:0`."""

    @property
    def copying(self) -> bool:
        """Whether weights are fetched into slots, or read where they are."""

    @property
    def own_memory(self) -> bool:
        """Whether compute can only use tensors that this device placed, or has `in_place`."""

    @property
    def answers(self) -> bool:
        """Whether tensors there have values that the host could ask for."""

    @property
    def part_elements(self) -> int:
        """Elements that are worked on at once where memory is to be small: a cache or a kernel."""

    @property
    def has_triton(self) -> bool:
        """Whether Triton compiles kernels for it."""

    def groups(self, dtype: torch.dtype) -> bool:
        """Return whether products of experts are one kernel: the host need not know of groups."""

    @property
    def placement(self) -> Placement:
        """Placement of the host memory and threads that work with it."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes of device memory that were in use at once."""

    @property
    def free_bytes(self) -> int:
        """Device memory that can still be had; 0 where it is the host's."""

    @property
    def integrated(self) -> bool:
        """Whether memory that it allocates as its own is the host's: one budget has both."""

    def cap(self, num_bytes: int) -> None:
        """Use no more device memory than this, from now on: beyond it `allocate` is full."""

    def lanes(self) -> list[Lane]:
        """Return new lanes, each with its stream."""

    def role_stream(self, role: str) -> Stream | None:
        """Return the stream of a role beside the lanes; None: work is done when its call returns.

        Two roles never share one: the work of either would wait behind that of the other.
        """

    def current_stream(self) -> Stream:
        """Return the stream of the lane that calls, where there are streams."""

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        """Return device memory as uint8. Raises OutOfDeviceMemory, naming the purpose."""

    def map_host(self, num_bytes: int, purpose: str) -> Tensor:
        """Return zeroed host memory, as uint8, that copies reach at full speed if they can.

        It begins on a page, so that direct I/O can move it too.
        """

    def unmap_host(self, arena: Tensor) -> None:
        """Take back what `map_host` returned, before it is dropped. No copy may be under way."""

    def in_place(self, tensor: Tensor) -> Tensor:
        """Return host memory that was pinned or mapped as compute uses it, where nothing is copied.

        Valid as long as the memory is.
        """

    def pin(self, name: str, arena: Tensor) -> None:
        """Let copies reach this host memory at full speed, if they can."""

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return a small host tensor, or its copy, where `to_device` need not wait for it."""

    def place(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device that stays. The caller waits for it: not inside an op."""

    def counted(self, tensor: Tensor, purpose: str) -> Tensor:
        """Count what compute made until nothing uses it any more, and return it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of flat bits, one side on the device, one in mapped or pinned memory."""

    def communicate(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], None]
    ) -> None:
        """Queue what ranks do together: `work` reads and writes device memory, or its copies."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a small tensor, which is `pinned`, on the device: the copy is queued."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a small device tensor on the host; its value is there once the op is complete."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return a small device tensor on the host, with its value: the host waits for it."""

    def seed(self, seed: int) -> None:
        """Set what layers draw their random numbers from."""

    def random_state(self) -> list[Tensor]:
        """Return the state for `set_random_state`, so that the caller's own draws continue."""

    def set_random_state(self, state: list[Tensor]) -> None: ...

    def synchronize(self) -> None:
        """Wait until everything that was queued is done."""

    def close(self) -> None:
        """Let go of host memory that was pinned. Another engine may use the device then."""

    def memory_snapshot(self) -> Any:
        """Return what device memory holds, as torch's viewer reads it; None: nobody knows."""


class Meter:
    """Counts live bytes; thread-safe."""

    def __init__(self, cap_bytes: int | None) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._cap_bytes = cap_bytes
        # Reentrant: garbage collected while it is held may be memory that is counted.
        self._lock = threading.RLock()

    def cap(self, num_bytes: int) -> None:
        """Refuse what exceeds `num_bytes`, or the cap that there was, if that is less."""
        with self._lock:
            before = self._cap_bytes
            self._cap_bytes = num_bytes if before is None else min(before, num_bytes)

    def add(self, num_bytes: int, purpose: str) -> None:
        """Count `num_bytes`, or raise OutOfDeviceMemory if they exceed the cap."""
        with self._lock:
            live = self.live_bytes + num_bytes
            if self._cap_bytes is not None and live > self._cap_bytes:
                raise OutOfDeviceMemory(
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
    """The CPU as a device. Host and device are one memory, and an op is done when it returns."""

    name = "cpu"
    own_memory = False
    answers = True
    integrated = False
    has_triton = False
    part_elements = PART_ELEMENTS
    free_bytes = 0

    def __init__(self, *, copying: bool = False, cap_bytes: int | None = None) -> None:
        self.copying = copying
        self.meter = Meter(cap_bytes)

    def groups(self, dtype: torch.dtype) -> bool:
        return True  # it has no kernel either, but nobody waits

    @property
    def placement(self) -> Placement:
        return Placement(update_threads=max(1, num_cores() // 2))  # compute needs the rest

    @property
    def peak_bytes(self) -> int:
        return self.meter.peak_bytes

    def cap(self, num_bytes: int) -> None:
        self.meter.cap(num_bytes)

    def lanes(self) -> list[Lane]:
        return [Lane(name) for name in LANES]

    def role_stream(self, role: str) -> None:
        return None

    def current_stream(self) -> Stream:
        raise AssertionError("there are no streams")

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        return self.counted(torch.empty(num_bytes, dtype=torch.uint8), purpose)

    def map_host(self, num_bytes: int, purpose: str) -> Tensor:
        return aligned_buffer(num_bytes)[:num_bytes]

    def unmap_host(self, arena: Tensor) -> None:
        pass

    def in_place(self, tensor: Tensor) -> Tensor:
        return tensor

    def pin(self, name: str, arena: Tensor) -> None:
        pass

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor

    def place(self, tensor: Tensor) -> Tensor:
        return tensor

    def counted(self, tensor: Tensor, purpose: str) -> Tensor:
        storage = tensor.untyped_storage()
        self.meter.add(storage.nbytes(), purpose)
        weakref.finalize(storage, self.meter.remove, storage.nbytes())
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        copy_bits(target, source)

    def communicate(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], None]
    ) -> None:
        work()

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def read(self, tensor: Tensor) -> Tensor:
        return tensor

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def random_state(self) -> list[Tensor]:
        return [torch.get_rng_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass

    def memory_snapshot(self) -> None:
        return None


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Copy bits between host tensors of one shape, on this thread alone."""
    # Not `copy_`: it would start a team of threads that takes cores from compute.
    _integers(target)[...] = _integers(source)


def _integers(tensor: Tensor) -> np.ndarray:
    """Return the bits, in the tensor's own shape and strides."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()


def draw_seed(seed: int, step: int, micro: int, block: int, tile: int | None = None) -> int:
    """Return the seed of a block's random numbers: near arguments give unrelated ones."""
    state, mask = 0, 2**64 - 1
    numbers = (seed, step, micro, block) if tile is None else (seed, step, micro, block, tile)
    for number in numbers:  # the finalizer of splitmix64, on each in turn
        state = ((state ^ number) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether device memory, or host memory that devices reach, has run out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
