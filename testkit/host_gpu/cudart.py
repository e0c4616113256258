"""What `torch.cuda.cudart()` offers: registering host memory, with CUDA's codes."""

from __future__ import annotations

import threading

from testkit.host_gpu.library import LIBRARY

TEXTS = {
    0: "no error",
    1: "invalid argument",
    2: "out of memory",
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
}
PORTABLE = 1
"""cudaHostRegisterPortable: for every device, not only for the one of the calling thread."""
_pending = threading.local()


class Cudart:
    """A call that fails leaves its error pending on the thread, until it is asked for."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        return _told(LIBRARY.register(address, num_bytes, flags & PORTABLE))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return _told(LIBRARY.unregister(address))

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return TEXTS.get(int(code), "unrecognized error code")

    def cudaGetLastError(self) -> int:  # noqa: N802
        code = pending_error()
        _pending.code = 0
        return code


def pending_error() -> int:
    """Return the error that the next call of CUDA on this thread would report."""
    return int(getattr(_pending, "code", 0))


def _told(code: int) -> int:
    if code:
        _pending.code = code
    return int(code)
