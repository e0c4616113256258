"""The device module `torch.hostgpu`: what torch and megatrain's runtime ask of one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch

from testkit.host_gpu.cudart import Cudart
from testkit.host_gpu.library import DEVICE_TYPE, LIBRARY, is_forked

CLOCK_HZ = 2e9
"""Cycles of `_sleep` in a second."""
_U64 = 2**64 - 1
_shown = True
_is_integrated = False


def show(shown: bool) -> None:
    """Say whether torch finds the device. A hidden one is loaded, and unavailable."""
    global _shown
    _shown = shown


def integrate(integrated: bool) -> None:
    """Say whether the device claims to share the host's memory."""
    global _is_integrated
    _is_integrated = integrated
    LIBRARY.integrate(int(integrated))


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return is_forked()


def device_count() -> int:
    return int(LIBRARY.device_count()) if _shown and not is_forked() else 0


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def get_device_name(device: Any = None) -> str:
    return f"testkit/host_gpu {_index(device)}"


def get_device_properties(device: Any = None) -> Any:
    total = torch.accelerator.get_memory_info(_index(device))[1]
    return SimpleNamespace(
        name=get_device_name(device), total_memory=total, is_integrated=_is_integrated
    )


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    LIBRARY.seed(current_device(), seed & _U64)


def manual_seed_all(seed: int) -> None:
    for device in range(int(LIBRARY.device_count())):
        LIBRARY.seed(device, seed & _U64)


def get_rng_state(device: Any = None) -> torch.Tensor:
    state = torch.empty(16, dtype=torch.uint8)
    LIBRARY.random_state(_index(device), _both(state))
    return state


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    if state.dtype is not torch.uint8 or state.shape != (16,) or state.device.type != "cpu":
        raise TypeError("a random state of hostgpu is 16 bytes on the CPU")
    LIBRARY.set_random_state(_index(device), _both(state.contiguous()))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    LIBRARY.cap(_index(device), fraction)


def set_sync_debug_mode(mode: int | str) -> None:
    """`error` makes an op raise where the host would wait for the device."""
    if mode not in (0, 2, "default", "error"):
        raise ValueError(f"hostgpu knows the modes default and error, not {mode}")
    LIBRARY.forbid_waits(int(mode in (2, "error")))


def cudart() -> Cudart:
    return Cudart()


def _sleep(cycles: int) -> None:
    """Keep the current stream of the current device busy."""
    LIBRARY.sleep(int(cycles / CLOCK_HZ * 1e6))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    named = None if device is None else torch.device(device)
    if named is not None and named.type != DEVICE_TYPE:
        raise ValueError(f"Expected a {DEVICE_TYPE} device, found {named}")
    return current_device() if named is None or named.index is None else named.index


def _both(state: torch.Tensor) -> Any:
    return ctypes.cast(state.data_ptr(), ctypes.POINTER(ctypes.c_uint64))
