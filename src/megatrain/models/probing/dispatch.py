"""The one mode by which readers see a model's operations.

Torch calls a mode for every operation that code runs while it is entered, below autograd: with
the operation, its arguments, and nothing of the module or the line that called it. Here the mode
hands them to a function, which returns the result; a reader is such a function.

    with intercepted(reader):
        template.front({}, inputs)

While a function handles an operation its own mode is off: what it computes is not handed to it.
Modes may be nested; what a function runs goes to the mode around its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

Operation = OpOverload
"""One of torch.ops, with its schema."""
Intercept = Callable[[Operation, tuple[Any, ...], dict[str, Any]], Any]
"""Gets an operation and its arguments, by place and by name; returns the result."""


def intercepted(handle: Intercept) -> AbstractContextManager[object]:
    """Return what to enter so that `handle` gives the result of every operation."""
    mode: AbstractContextManager[object] = _Mode(handle)
    return mode


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, handle: Intercept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, kwargs or {})
