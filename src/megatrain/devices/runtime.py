"""The runtime of a real accelerator: the only module that calls torch.accelerator or torch.cuda.

CUDA, ROCm and XPU share all of it but the registering of host memory, which torch offers for CUDA
and ROCm alone. For others it can allocate memory that is pinned, of any size since torch 2.13,
whose allocator can be told not to round sizes up to powers of two.

Other types of devices are not driven: lanes are threads with a stream each, and a device such as
MPS has one stream, and ends the process if two threads use it. A device that registers itself with
torch (PrivateUse1) is taken at its word.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.compat import set_allocator
from megatrain.devices.deterministic import unfilled
from megatrain.errors import ConfigError, NoDevice
from megatrain.lanes.device_clock import TimedEvent
from megatrain.lanes.lane import Stream
from megatrain.memory.host import free_bytes as host_free_bytes

PINNING_CAUSES = (
    "Usual causes: the memory limit of a container (cgroup), WSL2, which lets devices have half "
    "of the memory, or an IOMMU without room for it"
)
TAKEN = "Another engine of this process has pinned it: close that one first"
NO_WAY = "Torch 2.13 or newer can allocate it pinned, if PYTORCH_ALLOC_CONF is not set"
DRIVEN = ("cuda", "xpu")
"""The types of torch's own devices that the engine can drive; for torch, ROCm is cuda."""
_ALREADY_REGISTERED = 712
_ROUNDED_MIB = 64
"""Pinned memory up to this size is rounded up, and kept for the next who asks."""
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class PinningFailed(Exception):
    """The system refused to pin host memory, or to let go of it. Does not leave the devices."""

    def __init__(self, what: str, advice: str = PINNING_CAUSES) -> None:
        super().__init__(what)
        self.advice = advice


class Runtime(Protocol):
    """The interface of an accelerator's driver."""

    def set_device(self) -> None:
        """Make the device that of this thread, for good.

        Calls of a thread that never did go to the first device of the machine: each process would
        have a context there, of hundreds of MiB, whichever device is its own.
        """

    def stream(self, name: str = "", *, first: bool = False) -> Stream:
        """Return a new stream, or the one that engines of this process have under a name.

        `first`: what is queued on it goes before the work of others.
        """

    def current_stream(self) -> Any:
        """Return the stream that this thread has entered."""

    def timed_event(self) -> TimedEvent:
        """Return a new event that notes when a stream comes to it."""

    def named_range(self, name: str) -> AbstractContextManager[object]:
        """Name what this thread issues inside, for the driver's own profiler."""

    def empty(self, num_bytes: int) -> Tensor:
        """Return device memory as uint8. Raises torch.OutOfMemoryError."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Return pinned host memory as uint8: a little, or much where the device `allocates`."""

    def is_device(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in device memory."""

    @property
    def allocates(self) -> bool:
        """Whether large memory is to come from `pinned`, in its exact size: none is registered."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory in place. Raises PinningFailed."""

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises PinningFailed."""

    def shared(self, address: int, num_bytes: int) -> Tensor:
        """Return registered host memory as uint8 of the device, where both are one memory."""

    def communicate(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], None]
    ) -> None:
        """Queue a collective on the stream that this thread has entered."""

    @property
    def integrated(self) -> bool:
        """Whether device and host are one memory: bytes that one has, the other has not."""

    def limit(self, num_bytes: int | None) -> None:
        """Make `empty` and compute fail beyond this many bytes; None: beyond all there are."""

    @property
    def has_triton(self) -> bool:
        """Whether Triton compiles kernels for the device."""

    def groups(self, dtype: torch.dtype) -> bool:
        """Return whether torch has a kernel for products of groups of rows."""

    def seed(self, seed: int) -> None:
        """Set what compute draws from, on the device and on the host."""

    def random_state(self) -> list[Tensor]:
        """Return the states of all that `seed` sets."""

    def set_random_state(self, state: list[Tensor]) -> None: ...

    def synchronize(self) -> None: ...

    def peak_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...

    def memory_snapshot(self) -> Any:
        """Return what the allocator holds now, for people to look at; None: it does not tell."""


_named_streams: dict[tuple[torch.device, str], torch.Stream] = {}
_named_streams_lock = threading.Lock()


class TorchRuntime:
    """torch's current accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """With an index: `cuda:0`."""
        self._limit: int | None = None
        self._module: Any = torch.get_device_module(device)
        _grow_segments(device)
        self.allocates = not self._registers and _pins_exactly()
        self.set_device()

    @classmethod
    def find(cls, name: str = "", local_rank: int | None = None) -> TorchRuntime:
        """Return the runtime of torch's accelerator, or of the one called `name`.

        Where that has no number, `local_rank` chooses: the rank of that number on this host, or
        the only device that the launcher lets us see. Raises NoDevice.
        """
        if name.partition(":")[0] == "cpu":
            raise NoDevice(
                f"{name} is not an accelerator. Use mt.CpuDevice(), or memory.device: cpu"
            )
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise NoDevice(
                f"{name or 'accelerator'}: torch {torch.__version__} finds no accelerator on this "
                "machine. Use memory.device: cpu (in commands --device cpu), or check the driver "
                "and that this build of torch is for your device"
            )
        try:
            device = torch.device(name) if name else found
        except RuntimeError:
            raise NoDevice(f"{name} is not a device. Give cpu, cuda, cuda:1 or xpu") from None
        if device.type != found.type:
            raise NoDevice(f"{name}: the accelerator of this machine is {found.type}")
        if why := why_not_driven():
            raise NoDevice(f"{why}. Use memory.device: cpu (in commands --device cpu)")
        count = torch.accelerator.device_count()
        if device.index is not None and device.index >= count:
            last = f"{found.type}:{count - 1}"
            raise NoDevice(f"{name}: this machine has {count} devices, the last is {last}")
        if device.index is not None:
            return cls(device)
        if local_rank is None or count == 1:
            return cls(torch.device(device.type, torch.accelerator.current_device_index()))
        if local_rank >= count:
            raise NoDevice(
                f"rank {local_rank} of this host has no device: the host has {count}. Start at "
                f"most {count} ranks on it"
            )
        return cls(torch.device(device.type, local_rank))

    def set_device(self) -> None:
        torch.accelerator.set_device_index(self.device)

    def stream(self, name: str = "", *, first: bool = False) -> Stream:
        # Torch hands out the same 32 streams in turn: lanes of different kinds would share one
        # after a few engines, and then wait for each other.
        if not name:
            return torch.Stream(self.device, priority=-1 if first else 0)
        with _named_streams_lock:
            key = (self.device, name)
            if key not in _named_streams:
                _named_streams[key] = torch.Stream(self.device, priority=-1 if first else 0)
            kept = _named_streams[key]
        # An object of its own: torch keeps in it where the thread that entered it returns to, and
        # of two threads in one object each would return to the stream of the other.
        return torch.Stream(
            stream_id=kept.stream_id, device_index=kept.device_index, device_type=kept.device_type
        )

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def timed_event(self) -> torch.Event:
        return torch.Event(self.device, enable_timing=True)

    def named_range(self, name: str) -> AbstractContextManager[object]:
        if not hasattr(self._module, "nvtx"):
            raise ConfigError(
                f"MEGATRAIN_NVTX is set: torch has no NVTX ranges for {self.device.type}. Unset it"
            )
        entered: AbstractContextManager[object] = self._module.nvtx.range(name)
        return entered

    def empty(self, num_bytes: int) -> Tensor:
        # With deterministic algorithms torch fills fresh memory: gigabytes, and on the stream of
        # the allocating thread, which no lane waits for.
        with unfilled:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type

    @property
    def _registers(self) -> bool:
        return hasattr(self._module, "cudart")

    def register(self, address: int, num_bytes: int) -> None:
        if not self._registers:
            raise PinningFailed(f"torch cannot register host memory for {self.device.type}", NO_WAY)
        self.set_device()  # this may be a new thread
        # Flag 0: for the devices of this process, which has one.
        self._check("cudaHostRegister", self._cudart.cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> None:
        self.set_device()
        self._check("cudaHostUnregister", self._cudart.cudaHostUnregister(address))

    def shared(self, address: int, num_bytes: int) -> Tensor:
        # CUDA and ROCm give registered memory one address for host and device on 64-bit Linux.
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, num_bytes)
        flat = torch.empty(0, dtype=torch.uint8, device=self.device)
        return flat.set_(storage, 0, (num_bytes,), (1,))

    @property
    def _cudart(self) -> Any:
        return self._module.cudart()

    def _check(self, call: str, code: Any) -> None:
        """Raise PinningFailed with CUDA's own text if the call failed."""
        if int(code) == 0:
            return
        _clear_error(self._cudart)
        text = f"{call}: {self._cudart.cudaGetErrorString(code)} (error {int(code)})"
        raise PinningFailed(text, TAKEN if int(code) == _ALREADY_REGISTERED else PINNING_CAUSES)

    def communicate(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], None]
    ) -> None:
        work()  # torch queues it behind the stream, and the stream behind it

    @property
    def integrated(self) -> bool:
        if not hasattr(self._module, "get_device_properties"):
            return False
        properties = self._module.get_device_properties(self.device)
        return bool(getattr(properties, "is_integrated", False))

    def limit(self, num_bytes: int | None) -> None:
        _, total = self._memory_info()
        self._limit = num_bytes
        share = 1.0 if num_bytes is None else min(1.0, num_bytes / total)
        self._module.set_per_process_memory_fraction(share, self.device)

    @property
    def has_triton(self) -> bool:
        return self.device.type in DRIVEN

    def groups(self, dtype: torch.dtype) -> bool:
        if dtype is not torch.bfloat16 or not has_grouped_kernel(self.device):
            return False
        if self.device.type == "cuda":  # where its kernel is a loop that asks the device
            major, _ = self._module.get_device_capability(self.device)
            if torch.version.hip is not None or major not in (9, 10):
                return False
        return grouped_products_run(self.device, dtype)

    # Some layers draw on the host, which decides whether they run. Seeds of both are host work.

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        with torch.accelerator.device_index(self.device.index):  # not that of the thread
            self._module.manual_seed(seed)

    def random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), self._module.get_rng_state(self.device)]

    def set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        self._module.set_rng_state(state[1], self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.device))

    def free_bytes(self) -> int:
        allocated = torch.accelerator.memory_allocated(self.device)
        # What torch's allocator has kept of freed memory is there for who asks next.
        kept = torch.accelerator.memory_reserved(self.device) - allocated
        # An integrated device calls memory taken that holds pages of files, which give way.
        info = self._memory_info()
        free = kept + (min(host_free_bytes(), info[1]) if self.integrated else int(info[0]))
        if self._limit is None:
            return free
        return max(0, min(free, self._limit - allocated))

    def _memory_info(self) -> tuple[int, int]:
        """Return the bytes that are free, beside what the allocator keeps, and that there are."""
        try:
            free, total = torch.accelerator.get_memory_info(self.device)
        except RuntimeError:  # drivers of some integrated GPUs do not tell what is free
            total = self._module.get_device_properties(self.device).total_memory
            free = total - torch.accelerator.memory_reserved(self.device)
        return int(free), int(total)

    def forget_peak(self) -> None:
        """Count the most memory in use from now on."""
        torch.accelerator.reset_peak_memory_stats(self.device)

    def memory_facts(self) -> dict[str, int]:
        """Return what the driver calls free, and what torch's allocator holds and has held."""
        free, total = self._memory_info()
        return {
            "driver_free_bytes": free,
            "total_bytes": total,
            "peak_allocated_bytes": int(torch.accelerator.max_memory_allocated(self.device)),
            "peak_reserved_bytes": int(torch.accelerator.max_memory_reserved(self.device)),
        }

    def memory_snapshot(self) -> Any:
        snapshot = getattr(getattr(self._module, "memory", None), "_snapshot", None)
        return None if snapshot is None else snapshot()


def _grow_segments(device: torch.device) -> None:
    """Let CUDA's allocator extend its segments: lengths that change would leave holes otherwise.

    It reads this before its first allocation. Settings of the user stay.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return
    if not any(name in os.environ for name in _ALLOCATOR_SETTINGS) and _has_nvml():
        set_allocator("expandable_segments:True")


def _has_nvml() -> bool:
    """Return whether the driver's library for monitoring is here and answers.

    torch 2.13 asks it for the links of a card before it makes a segment that can grow. Without it
    (containers whose driver has only the capability `compute`, some MIG and vGPU, Tegra) that ends
    in an internal error, or kills the process.
    """
    try:
        return int(ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()) == 0
    except (OSError, AttributeError):
        return False


def _pins_exactly() -> bool:
    """Let torch pin memory in the size that is asked for; return whether it can.

    Settings of the user stay: then it is not told.
    """
    if any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        return False
    try:
        set_allocator(f"pinned_max_cached_size_mb:{_ROUNDED_MIB}")
    except RuntimeError:  # a torch that rounds all sizes up
        return False
    return True


def has_grouped_kernel(device: torch.device) -> bool:
    """Return whether torch has a kernel of the device for products of groups of rows.

    Without one it would ask the device for the groups, and loop.
    """
    key = {"cuda": "CUDA", "xpu": "XPU"}.get(device.type, "PrivateUse1")
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key)


@cache
def grouped_products_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel multiplies two groups of rows, forward and backward."""
    with torch.enable_grad():
        rows = torch.zeros(32, 16, dtype=dtype, device=device, requires_grad=True)
        weights = torch.zeros(2, 16, 16, dtype=dtype, device=device, requires_grad=True)
        ends = torch.arange(16, 48, 16, dtype=torch.int32, device=device)
        try:
            output = torch._grouped_mm(rows, weights, offs=ends)
            torch.autograd.grad(output, (rows, weights), torch.zeros_like(output))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):  # NotImplementedError is one too
            return False
    return True


def _clear_error(cudart: Any) -> None:
    """Forget the failure of this thread's last call: the next kernel would be blamed for it."""
    for library in (cudart, ctypes.CDLL(None)):  # torch has made its CUDA's names global
        for name in ("cudaGetLastError", "hipGetLastError"):
            if (clear := getattr(library, name, None)) is not None:
                clear()
                return


def why_not_driven() -> str:
    """Return why torch's accelerator is not used; empty: it can be, or there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type in {*DRIVEN, torch._C._get_privateuse1_backend_name()}:
        return ""
    return (
        f"{found.type}: MegaTrain cannot drive this type of device, only {' and '.join(DRIVEN)}, "
        "because its lanes need threads with a stream each"
    )


def num_accelerators() -> int:
    """Return how many accelerators the engine can use here."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return 0 if found is None or why_not_driven() else torch.accelerator.device_count()


def pci_address(device: str) -> str | None:
    """Return where a CUDA or ROCm device is on the bus, as /sys calls it; None if unknown."""
    if not device.startswith("cuda"):
        return None
    facts: Any = torch.cuda.get_device_properties(device)
    if hasattr(facts, "pci_bus_id"):
        return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    return None  # a torch that does not know
