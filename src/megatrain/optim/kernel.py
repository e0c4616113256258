"""The host kernel: the arithmetic on the store, for all implementations.

    native.py         kernel.c by ctypes, at the speed of memory
    torch_kernel.py   the same bits by torch, where kernel.c was not built

Weights are a split master (`hi` bf16 and `lo` int16, together one fp32 number: memory/master.py) or
plain fp32 (`lo` is None). Moments are states as optim/states.py declares them: an update computes
in fp32, moves the weight by moments that are not rounded, and then stores them (state_codes.py).

Every method works in place on 1-D contiguous host tensors, lets other Python threads run, and
returns when the work is done. The caller ensures that no other thread touches the tensors
meanwhile. Gradients must be finite: ask `squared_norm` first.

Laws (tests/optim/test_kernel.py, test_squared_norm.py)
    1. Native, for every instruction set and number of threads, gives the bits of torch.
    2. A split master equals a separate fp32 master, bit for bit.
    3. Finite gradients leave weights finite (beta1 >= 0.5, eps > 0), and stored moments too unless
       they are fp32, where v may overflow.
    4. The squared norm is finite exactly when every element is.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.optim.rounding import Rounding
from megatrain.optim.states import SHARED

CHUNK = 65536
"""Elements per partial sum of a squared norm. Part of the result: it fixes the order of the sum."""

_EXACT = Rounding(seed=0, update=0, first=0)
"""For states in fp32, which are not rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounded:
    """Numbers of which each is rounded once to fp32."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            rounded = ctypes.c_float(getattr(self, field.name)).value
            object.__setattr__(self, field.name, rounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWScalars(_Rounded):
    """The numbers that one update needs beside the tensors, each rounded once to fp32.

    g = grad * grad_scale;  m += g * one_minus_beta1 - m * one_minus_beta1
    v = v * beta2 + (g * one_minus_beta2) * g
    weight = weight * decay - m / (sqrt(v) * denom_scale + eps) * step_size
    """

    grad_scale: float
    """The clip factor, and whatever else multiplies the gradient."""
    decay: float
    """1 - lr * weight_decay."""
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    denom_scale: float
    """1 / sqrt(1 - beta2 ** step)."""
    eps: float
    step_size: float
    """lr / (1 - beta1 ** step)."""

    @classmethod
    def at(
        cls,
        step: int,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_scale: float = 1.0,
    ) -> AdamWScalars:
        """The scalars of update number `step`, counted from 1, computed in double precision."""
        assert step >= 1, step
        beta1, beta2 = betas
        return cls(
            grad_scale=grad_scale,
            decay=1 - lr * weight_decay,
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            denom_scale=1 / math.sqrt(1 - beta2**step),
            eps=eps,
            step_size=lr / (1 - beta1**step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedScalars:
    """The scalars of an update whose moments are rounded, multiplied together beforehand.

    m = m * beta1 + g * grad_to_m;  v = v * beta2 + (g * grad_to_v) ** 2;  d = sqrt(v) + eps
    weight = weight * decay - (m * (step_size / (d * e))) * e

    e is d of the element's neighbor (0 and 1, 2 and 3, ...): two elements share a division.
    """

    decay: float
    beta1: float
    grad_to_m: float
    beta2: float
    grad_to_v: float
    eps: float
    """At least 2**-60, so that a product of two does not underflow."""
    step_size: float

    @classmethod
    def of(cls, s: AdamWScalars) -> FoldedScalars:
        """Return the folded scalars, each rounded once to fp32."""
        folded = {
            "decay": s.decay,
            "beta1": 1 - s.one_minus_beta1,
            "grad_to_m": s.grad_scale * s.one_minus_beta1,
            "beta2": s.beta2,
            "grad_to_v": s.grad_scale * math.sqrt(s.one_minus_beta2),
            "eps": max(s.eps / s.denom_scale, 2.0**-60),
            "step_size": s.step_size / s.denom_scale,
        }
        return cls(**{name: ctypes.c_float(value).value for name, value in folded.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumScalars(_Rounded):
    """The numbers that a momentum needs beside the tensors, each rounded once to fp32.

    g = grad * grad_scale, at most LARGEST_GRAD
    m = m + (g - m) * pull
    grad = m - (m - g) * lag

    Differences round to fp32; a product and its sum are computed in fp64, and round once more. So
    these are the bits of torch's lerp where that has fused instructions. Orthogonalization takes
    the last bits of a direction for large differences, so nothing less compares with torch.
    """

    grad_scale: float
    """The clip factor, and whatever else multiplies the gradient."""
    pull: float
    """1 - beta."""
    lag: float
    """1 less beta in fp32."""

    @classmethod
    def of(cls, beta: float, grad_scale: float) -> MomentumScalars:
        """The scalars of a momentum that keeps `beta` of itself, at least a half."""
        assert 0.5 <= beta < 1, beta
        return cls(grad_scale=grad_scale, pull=1 - beta, lag=1 - ctypes.c_float(beta).value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescentScalars(_Rounded):
    """The numbers of a step along a direction.

    weight = weight * decay - direction * step_size. The first product rounds to fp32, the second
    and the difference are computed in fp64 and round once.
    """

    decay: float
    """1 - lr * weight_decay."""
    step_size: float


class Kernel(abc.ABC):
    """Checks its arguments; a subclass computes."""

    description: str
    """For people: which implementation this is and, if it is the slow one, why."""

    def adamw(
        self,
        weight: Tensor,
        lo: Tensor | None,
        states: Sequence[Tensor],
        grad: Tensor,
        scalars: AdamWScalars,
        rounding: Rounding | None = None,
        *,
        num_threads: int,
    ) -> None:
        """Update `weight` (with its `lo`) and the moments in one pass.

        `grad` is bf16 or fp32 for a split master, fp32 for an fp32 weight. The dtypes of `states`
        tell how moments are stored. Unless that is fp32, `rounding` is needed, the number of
        elements is a multiple of SHARED, and a gradient beyond 2**63 counts as 2**63. A stored
        moment below the smallest normal fp32 number counts as zero.
        """
        _check_master(weight, lo, grad)
        _check_states(states, grad)
        assert rounding is not None or states[0].dtype == torch.float32, states[0].dtype
        assert num_threads >= 1, num_threads
        self._adamw(weight, lo, states, grad, scalars, rounding or _EXACT, num_threads)

    def momentum(
        self,
        states: Sequence[Tensor],
        grad: Tensor,
        scalars: MomentumScalars,
        rounding: Rounding | None = None,
        *,
        num_threads: int,
    ) -> None:
        """Move a momentum by `grad`, and write over `grad` the direction that is ahead of it.

        `grad` is bf16 or fp32; the direction is rounded once to that. The dtypes of `states`, a
        momentum or its codes and their scales, tell how it is stored, as in `adamw`.
        """
        _check(grad, torch.bfloat16, torch.float32, like=grad)
        if len(states) == 1:
            _check(states[0], torch.float32, torch.bfloat16, like=grad)
        else:
            m, m_scale = states
            _check(m, torch.int8, like=grad)
            _check(m_scale, torch.float32, like=grad[::SHARED])
        exact = states[0].dtype == torch.float32
        assert exact or (rounding is not None and grad.numel() % SHARED == 0), grad.numel()
        assert num_threads >= 1, num_threads
        self._momentum(states, grad, scalars, rounding or _EXACT, num_threads)

    def descend(
        self,
        weight: Tensor,
        lo: Tensor | None,
        direction: Tensor,
        scalars: DescentScalars,
        *,
        num_threads: int,
    ) -> None:
        """Move `weight` (with its `lo`) against `direction`, whose dtype is that of a gradient."""
        _check_master(weight, lo, direction)
        assert num_threads >= 1, num_threads
        self._descend(weight, lo, direction, scalars, num_threads)

    def squared_norm(self, grad: Tensor, *, num_threads: int) -> float:
        """The sum of squares of `grad`, bf16 or fp32, in double precision.

        Not finite exactly when an element of `grad` is not finite.
        """
        _check(grad, torch.bfloat16, torch.float32, like=grad)
        assert num_threads >= 1, num_threads
        num_chunks = -(-grad.numel() // CHUNK)
        sums = torch.empty(num_chunks, dtype=torch.float64)
        self._square_sums(grad, sums, num_threads)
        # fsum rounds once; the built-in sum depends on the version of Python
        return math.fsum(sums.tolist())

    @abc.abstractmethod
    def _adamw(
        self,
        weight: Tensor,
        lo: Tensor | None,
        states: Sequence[Tensor],
        grad: Tensor,
        scalars: AdamWScalars,
        rounding: Rounding,
        num_threads: int,
    ) -> None: ...

    @abc.abstractmethod
    def _momentum(
        self,
        states: Sequence[Tensor],
        grad: Tensor,
        scalars: MomentumScalars,
        rounding: Rounding,
        num_threads: int,
    ) -> None: ...

    @abc.abstractmethod
    def _descend(
        self,
        weight: Tensor,
        lo: Tensor | None,
        direction: Tensor,
        scalars: DescentScalars,
        num_threads: int,
    ) -> None: ...

    @abc.abstractmethod
    def _square_sums(self, grad: Tensor, sums: Tensor, num_threads: int) -> None: ...


def _check_master(weight: Tensor, lo: Tensor | None, grad: Tensor) -> None:
    if lo is None:
        _check(weight, torch.float32, like=grad)
        _check(grad, torch.float32, like=grad)
    else:
        _check(weight, torch.bfloat16, like=grad)
        _check(lo, torch.int16, like=grad)
        _check(grad, torch.bfloat16, torch.float32, like=grad)


def _check_states(states: Sequence[Tensor], grad: Tensor) -> None:
    if len(states) == 2:
        for state in states:
            _check(state, torch.float32, torch.bfloat16, like=grad)
        assert states[0].dtype == states[1].dtype, [state.dtype for state in states]
    else:
        m, m_scale, v, v_scale = states
        _check(m, torch.int8, like=grad)
        _check(v, torch.uint8, like=grad)
        _check(m_scale, torch.float32, like=grad[::SHARED])
        _check(v_scale, torch.float32, like=grad[::SHARED])
    assert states[0].dtype == torch.float32 or grad.numel() % SHARED == 0, grad.numel()


def _check(tensor: Tensor, *dtypes: torch.dtype, like: Tensor) -> None:
    assert tensor.dtype in dtypes, (tensor.dtype, dtypes)
    assert tensor.shape == (like.numel(),), (tensor.shape, like.shape)
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.device.type == "cpu", tensor.device
