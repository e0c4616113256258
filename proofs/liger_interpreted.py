"""Triton's interpreter, as far as Liger's kernels need it. Imported where Triton is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def prepare() -> None:
    """Let the interpreter run Liger's kernels. Call it before Liger is imported."""
    import numpy as np

    triton, language = import_module("triton"), import_module("triton.language")
    interpreter: Any = import_module("triton.runtime.interpreter")
    own = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if type(argument) is not float:
            return own(argument)
        handle = interpreter.TensorHandle(np.array([argument], np.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = convert
    library = import_module("triton.language.extra.libdevice")
    stand_ins = import_module("proofs.liger_library")
    for name in ("rsqrt", "tanh"):
        setattr(library, name, triton.jit(getattr(stand_ins, name)))
