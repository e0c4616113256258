"""The runtime of a real accelerator: the only module that calls torch.accelerator or torch.cuda.

CUDA, ROCm and XPU share all of it but the registering of host memory, which torch offers for CUDA
and ROCm alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.errors import NoDevice
from megatrain.lanes.lane import Stream


class PinningFailed(Exception):
    """The system refused to pin host memory. Does not leave the devices."""


class Runtime(Protocol):
    """What an accelerator's driver offers."""

    def stream(self) -> Stream:
        """Return a new stream."""

    def current_stream(self) -> Any:
        """Return the stream that this thread has entered."""

    def empty(self, num_bytes: int) -> Tensor:
        """Return device memory as uint8. Raises torch.OutOfMemoryError."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Return a little pinned host memory as uint8."""

    def is_device(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in device memory."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory in place. Raises PinningFailed."""

    def unregister(self, address: int) -> None: ...

    def limit(self, num_bytes: int) -> None:
        """Make `empty` and compute fail beyond this many bytes."""

    def seed(self, seed: int) -> None: ...

    def random_state(self) -> list[Tensor]: ...

    def set_random_state(self, state: list[Tensor]) -> None: ...

    def synchronize(self) -> None: ...

    def peak_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...


class TorchRuntime:
    """torch's current accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """With an index: `cuda:0`."""
        self._limit: int | None = None
        self._module: Any = torch.get_device_module(device)
        torch.accelerator.set_device_index(device)

    @classmethod
    def find(cls, name: str = "") -> TorchRuntime:
        """Return the runtime of torch's accelerator, or of the one called `name`.

        Raises NoDevice.
        """
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            raise NoDevice(
                f"{name or 'accelerator'}: torch {torch.__version__} finds no accelerator on this "
                "machine. Use memory.device: cpu, or check the driver and that this build of "
                "torch is for your device"
            )
        try:
            device = torch.device(name) if name else found
        except RuntimeError:
            raise NoDevice(f"{name} is not a device. Give cpu, cuda, cuda:1 or xpu") from None
        if device.type != found.type:
            raise NoDevice(f"{name}: the accelerator of this machine is {found.type}")
        count = torch.accelerator.device_count()
        if device.index is not None and device.index >= count:
            last = f"{found.type}:{count - 1}"
            raise NoDevice(f"{name}: this machine has {count} devices, the last is {last}")
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        return cls(torch.device(device.type, index))

    def stream(self) -> Stream:
        return torch.Stream(self.device)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def empty(self, num_bytes: int) -> Tensor:
        # With deterministic algorithms torch fills fresh memory: gigabytes, and on the stream of
        # the allocating thread, which no lane waits for.
        settings: Any = torch.utils.deterministic
        fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        finally:
            settings.fill_uninitialized_memory = fills

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type

    def register(self, address: int, num_bytes: int) -> None:
        if self.device.type != "cuda":
            raise PinningFailed(f"torch cannot register host memory for {self.device.type}")
        torch.accelerator.set_device_index(self.device)  # this may be a new thread
        code = self._cudart().cudaHostRegister(address, num_bytes, 0)
        if int(code) != 0:
            raise PinningFailed(f"cudaHostRegister returned {code}")

    def unregister(self, address: int) -> None:
        self._cudart().cudaHostUnregister(address)

    @staticmethod
    def _cudart() -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def limit(self, num_bytes: int) -> None:
        _, total = torch.accelerator.get_memory_info(self.device)
        self._limit = num_bytes
        self._module.set_per_process_memory_fraction(min(1.0, num_bytes / total), self.device)

    def seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def random_state(self) -> list[Tensor]:
        return [self._module.get_rng_state(self.device)]

    def set_random_state(self, state: list[Tensor]) -> None:
        self._module.set_rng_state(state[0], self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.device))

    def free_bytes(self) -> int:
        free = int(torch.accelerator.get_memory_info(self.device)[0])
        if self._limit is None:
            return free
        return max(0, min(free, self._limit - torch.accelerator.memory_allocated(self.device)))
