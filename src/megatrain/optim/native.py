"""The kernel by kernel.c: loads the library beside this file and calls it.

The library is built when the package is (setup.py), never at run time. Where it is missing or does
not fit, `load_kernel` gives the torch kernel, which computes the same bits, and reports why.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_size_t, c_uint64, c_void_p
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from megatrain.optim.kernel import (
    AdamWScalars,
    DescentScalars,
    FoldedScalars,
    Kernel,
    MomentumScalars,
)
from megatrain.optim.rounding import Rounding
from megatrain.optim.torch_kernel import TorchKernel

LIBRARY = Path(__file__).with_name("libkernel.so")

INTERFACE = 5
"""The answer of kernel.c; any other number means a library of another version."""

INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
"""Numbered as in kernel.c, the better later. On ARM the baseline is NEON."""

_STATE_KINDS = (torch.float32, torch.bfloat16, torch.int8)
"""Codes by the dtype of m, numbered as in kernel.c."""


class LibraryError(Exception):
    """The library is missing, does not load, or is of another version; the text names the "
    "reason."""


class NativeKernel(Kernel):
    """Uses the best instruction set of this machine unless another is given."""

    def __init__(self, library: Path = LIBRARY, instruction_set: str | None = None) -> None:
        self._library = _load(library)
        self.instruction_sets = tuple(
            name
            for number, name in enumerate(INSTRUCTION_SETS)
            if self._library.megatrain_supports(number)
        )
        chosen = instruction_set or self.instruction_sets[-1]
        assert chosen in self.instruction_sets, (chosen, self.instruction_sets)
        self._chosen = INSTRUCTION_SETS.index(chosen)
        one = ", one thread: built without OpenMP" * hasattr(self._library, "megatrain_one_thread")
        self.description = f"native ({chosen}{one})"

    def _adamw(
        self,
        weight: Tensor,
        lo: Tensor | None,
        states: Sequence[Tensor],
        grad: Tensor,
        scalars: AdamWScalars,
        rounding: Rounding,
        num_threads: int,
    ) -> None:
        self._library.megatrain_adamw(
            self._chosen,
            num_threads,
            grad.numel(),
            weight.data_ptr(),
            None if lo is None else lo.data_ptr(),
            _STATE_KINDS.index(states[0].dtype),
            ctypes.byref(_moments(states, rounding)),
            grad.data_ptr(),
            grad.dtype == torch.bfloat16,
            ctypes.byref(_Scalars(*_FIELDS(scalars))),
            ctypes.byref(_Folded(*_FOLDED_FIELDS(FoldedScalars.of(scalars)))),
        )

    def _momentum(
        self,
        states: Sequence[Tensor],
        grad: Tensor,
        scalars: MomentumScalars,
        rounding: Rounding,
        num_threads: int,
    ) -> None:
        m, m_scale = states if len(states) == 2 else (states[0], None)
        scale = 0 if m_scale is None else m_scale.data_ptr()
        self._library.megatrain_momentum(
            self._chosen,
            num_threads,
            grad.numel(),
            _STATE_KINDS.index(m.dtype),
            ctypes.byref(_Moments(m.data_ptr(), 0, scale, 0, rounding.stream, rounding.first)),
            grad.data_ptr(),
            grad.dtype == torch.bfloat16,
            scalars.grad_scale,
            scalars.pull,
            scalars.lag,
        )

    def _descend(
        self,
        weight: Tensor,
        lo: Tensor | None,
        direction: Tensor,
        scalars: DescentScalars,
        num_threads: int,
    ) -> None:
        self._library.megatrain_descend(
            self._chosen,
            num_threads,
            direction.numel(),
            weight.data_ptr(),
            None if lo is None else lo.data_ptr(),
            direction.data_ptr(),
            direction.dtype == torch.bfloat16,
            scalars.decay,
            scalars.step_size,
        )

    def _square_sums(self, grad: Tensor, sums: Tensor, num_threads: int) -> None:
        self._library.megatrain_square_sums(
            self._chosen,
            num_threads,
            grad.numel(),
            grad.data_ptr(),
            grad.dtype == torch.bfloat16,
            sums.data_ptr(),
        )

    def triad(self, a: Tensor, b: Tensor, c: Tensor, *, num_threads: int) -> None:
        """a = b + 3 c in fp64: 24 bytes an element, the measure of this machine's memory."""
        for tensor in (a, b, c):
            assert tensor.dtype == torch.float64, tensor.dtype
            assert tensor.shape == (a.numel(),), tensor.shape
            assert tensor.is_contiguous(), tensor.stride()
        self._library.megatrain_triad(
            self._chosen, num_threads, a.numel(), a.data_ptr(), b.data_ptr(), c.data_ptr()
        )


@functools.cache
def load_kernel(library: Path = LIBRARY) -> Kernel:
    """The native kernel, or torch's where the library cannot be used."""
    try:
        return NativeKernel(library)
    except LibraryError as error:
        return TorchKernel(why=str(error))


class _Scalars(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_float) for field in dataclasses.fields(AdamWScalars)]


class _Folded(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_float) for field in dataclasses.fields(FoldedScalars)]


_FIELDS = attrgetter(*(field[0] for field in _Scalars._fields_))
_FOLDED_FIELDS = attrgetter(*(field[0] for field in _Folded._fields_))


class _Moments(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("m", "v", "m_scale", "v_scale")],
        *[(name, c_uint64) for name in ("stream", "first")],
    ]


def _moments(states: Sequence[Tensor], rounding: Rounding) -> _Moments:
    pointers = [state.data_ptr() for state in states]
    m, m_scale, v, v_scale = pointers if len(pointers) == 4 else (pointers[0], 0, pointers[1], 0)
    return _Moments(m, v, m_scale, v_scale, rounding.stream, rounding.first)


# (instruction_set, num_threads, n, ...)
_ARGUMENTS = {
    "megatrain_adamw": (
        *(c_int, c_int, c_size_t, c_void_p, c_void_p, c_int, ctypes.POINTER(_Moments)),
        *(c_void_p, c_int, ctypes.POINTER(_Scalars), ctypes.POINTER(_Folded)),
    ),
    "megatrain_momentum": (
        *(c_int, c_int, c_size_t, c_int, ctypes.POINTER(_Moments), c_void_p, c_int),
        *(c_float, c_float, c_float),
    ),
    "megatrain_descend": (
        *(c_int, c_int, c_size_t, c_void_p, c_void_p, c_void_p, c_int, c_float, c_float),
    ),
    "megatrain_square_sums": (c_int, c_int, c_size_t, c_void_p, c_int, c_void_p),
    "megatrain_triad": (c_int, c_int, c_size_t, c_void_p, c_void_p, c_void_p),
}


def _load(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise LibraryError(f"{path.name} is missing in {path.parent}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path.name} does not load: {error}") from error
    found = library.megatrain_interface() if hasattr(library, "megatrain_interface") else None
    if found != INTERFACE:
        raise LibraryError(
            f"{path.name} has interface {found}, {INTERFACE} is needed: install the package again"
        )
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = None
    return library
