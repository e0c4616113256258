"""Kernels that give the same bits each time they run: `train.deterministic`, checks of a device.

Some kernels of a GPU add with atomics, in whatever order their blocks finish: the backward of flash
attention, and rows that are gathered or scattered. torch has slower ones in a fixed order for most
of them, and raises where it has none. Not `warn_only`: attention of SDPBackend.EFFICIENT_ATTENTION
then keeps its atomics. cuBLAS keeps to one order only with a workspace of a fixed size, which it
reads from the environment when its first handle is made.

All of these are switches of the process. Whoever needs one holds it; the last one to let go puts
back what the user had.

Laws (tests/devices/test_deterministic.py)
    1. The switches are on while anyone holds them, and then as they were, also after an error.
    2. Fresh memory is not filled meanwhile: compute reads none of it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

import torch

from megatrain.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_KERNEL = re.compile(r"\S+ does not have a deterministic implementation")


class Switch:
    """A switch of the process that threads hold at the same time; a context manager."""

    def __init__(self, turn: Callable[[], Callable[[], None]]) -> None:
        """`turn` turns it, and returns what puts it back."""
        self._turn = turn
        self._put_back: Callable[[], None] | None = None
        self._num_holders = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._put_back is None:
                self._put_back = self._turn()
            self._num_holders += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0 and self._put_back is not None:
                put_back, self._put_back = self._put_back, None
                put_back()


def _leave_unfilled() -> Callable[[], None]:
    settings: Any = torch.utils.deterministic
    before, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False

    def put_back() -> None:
        settings.fill_uninitialized_memory = before

    return put_back


def _fix_order() -> Callable[[], None]:
    had_workspace = WORKSPACE in os.environ
    os.environ.setdefault(WORKSPACE, ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    unfilled.__enter__()
    torch.use_deterministic_algorithms(True)

    def put_back() -> None:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        unfilled.__exit__()
        if not had_workspace:
            del os.environ[WORKSPACE]

    return put_back


unfilled = Switch(_leave_unfilled)
"""Held: fresh memory stays as it is, where torch would fill it with deterministic algorithms."""
deterministic_kernels = Switch(_fix_order)
"""Held: torch takes kernels that repeat their bits, or raises. To be held before the first product
on a device."""


def require_kernel(error: BaseException) -> None:
    """Raise ConfigError, from the error, if that says that torch has no such kernel for an op."""
    found = _NO_KERNEL.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is not None:
        raise ConfigError(
            f"train.deterministic is true: {found[0]} in torch {torch.__version__} on this device. "
            "Set train.deterministic to false"
        ) from error
