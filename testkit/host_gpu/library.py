"""The device's library: loaded at import, by ctypes."""

from __future__ import annotations

import atexit
import ctypes
import os
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from testkit.host_gpu.building import built_library, unavailable

DEVICE_TYPE = "hostgpu"
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "device_count": (c_int, []),
    "cap": (None, [c_int, c_double]),
    "register": (c_int, [c_void_p, c_size_t, c_int]),
    "unregister": (c_int, [c_void_p]),
    "refuse_at": (None, [c_int]),
    "registered_bytes": (c_size_t, []),
    "seed": (None, [c_int, c_uint64]),
    "random_state": (None, [c_int, POINTER(c_uint64)]),
    "set_random_state": (None, [c_int, POINTER(c_uint64)]),
    "sleep": (None, [c_uint64]),
    "timing": (None, [c_int, c_double, c_int, c_double]),
    "synchronize": (None, []),
    "integrate": (None, [c_int]),
    "forbid_waits": (None, [c_int]),
    "forget_faults": (None, []),
    "counter": (c_uint64, [c_int]),
    "unshaped_ops": (c_size_t, [c_char_p, c_size_t]),
}


class Library:
    """The functions of native/python.cpp, without their prefix."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}
        other = torch.accelerator.current_accelerator(check_available=True)
        if other is not None:
            raise unavailable(
                f"testkit/host_gpu would hide the accelerator of this machine, {other}"
            )
        path = built_library()
        rename_privateuse1_backend(DEVICE_TYPE)
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"host_gpu_{name}")
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def __getattr__(self, name: str) -> Any:
        return self._functions[name]


class _Forks:
    """A child of this process has none of the streams' threads."""

    def __init__(self) -> None:
        self.forked = False
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.forked = True


LIBRARY = Library()
_forks = _Forks()


def is_forked() -> bool:
    """Return whether this process is a child that has only the memory of its parent."""
    return _forks.forked


@atexit.register
def _finish() -> None:
    """Static destructors must not meet a stream at work."""
    if not is_forked():
        LIBRARY.timing(0, 0.0, 0, 0.0)
        LIBRARY.synchronize()
