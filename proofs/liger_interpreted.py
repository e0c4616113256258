"""Liger's kernels on the CPU: by Triton's interpreter, and by the same sums in torch.

The interpreter takes milliseconds for each row of a norm. So some launches run by it, and by torch
on copies of their arguments, and both must agree in every tensor they read or write; all other
launches run by torch alone. Imported where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

NEAR = 2e-6
"""Largest difference of a tensor after a launch, relative to its largest value, in fp32."""


class Launches:
    """Runs launches of kernels, and knows which were compared."""

    def __init__(self) -> None:
        self.compares = True
        self.compared: dict[str, float] = {}
        """Kernels that ran both ways, and the furthest that they were apart."""
        self.alone: set[str] = set()
        """Kernels that only the interpreter has run: there are no sums of them here."""

    def run(self, own: Callable[..., None], kernel: Any, *args: Any, **options: Any) -> None:
        """Launch a kernel; `own` is the interpreter."""
        name = kernel.fn.__name__
        if name not in SUMS:
            self.alone.add(name)
            own(kernel, *args, **options)
            return
        by_name = dict(zip(kernel.arg_names, args, strict=False)) | options
        if not self.compares:
            SUMS[name](by_name)
            return
        # What is one tensor for the kernel is one for the sums: some write where they read.
        copies = {id(v): v.clone() for v in by_name.values() if isinstance(v, Tensor)}
        SUMS[name]({key: copies.get(id(value), value) for key, value in by_name.items()})
        own(kernel, *args, **options)
        for value in by_name.values():
            if isinstance(value, Tensor):
                largest = value.abs().max().clamp_min(1e-30)  # weights of some norms begin at 0
                far = float((value - copies[id(value)]).abs().max() / largest)
                assert far < NEAR, f"{name}: {far:.1e} apart"
                self.compared[name] = max(far, self.compared.get(name, 0.0))


def prepare() -> Launches:
    """Let Liger's kernels run here. Call it before Liger is imported."""
    triton, language = import_module("triton"), import_module("triton.language")
    interpreter: Any = import_module("triton.runtime.interpreter")
    converted = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if type(argument) is not float:
            return converted(argument)
        handle = interpreter.TensorHandle(np.array([argument], np.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = convert
    library = import_module("triton.language.extra.libdevice")
    stand_ins = import_module("proofs.liger_library")
    for name in ("rsqrt", "tanh"):
        setattr(library, name, triton.jit(getattr(stand_ins, name)))
    launches, own = Launches(), interpreter.InterpretedFunction.run

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        launches.run(own, kernel, *args, **options)

    interpreter.InterpretedFunction.run = run
    return launches


def _norm(given: dict[str, Any]) -> None:
    x, weight = given["X_ptr"], given["W_ptr"]
    root = torch.rsqrt(x.square().mean(-1) + given["eps"])
    given["RSTD_ptr"].copy_(root)
    scale = 1.0 if weight is None else given["offset"] + weight
    given["Y_ptr"].copy_(x * root[:, None] * scale)


def _norm_back(given: dict[str, Any]) -> None:
    x, weight, d_y = given["X_ptr"], given["W_ptr"], given["dY_ptr"]
    root = given["RSTD_ptr"][:, None]
    d_scaled = d_y if weight is None else d_y * (weight + given["offset"])
    along = (d_scaled * x).mean(-1, keepdim=True)
    d_x = root * (d_scaled - root.square() * along * x)
    if given["dW_ptr"] is not None:
        given["dW_ptr"].copy_((d_y * x * root).sum(0, keepdim=True))
    given["dX_ptr"].copy_(d_x)  # last: it may be where the gradient was


def _swiglu(given: dict[str, Any]) -> None:
    gate = given["a_ptr"] * given["gate_multiplier"]
    given["c_ptr"].copy_(F.silu(gate) * given["b_ptr"])


def _swiglu_back(given: dict[str, Any]) -> None:
    multiplier = given["gate_multiplier"]
    _gated_back(
        lambda gate: F.silu(gate * multiplier), given["dc_ptr"], given["a_ptr"], given["b_ptr"]
    )


def _geglu(given: dict[str, Any]) -> None:
    given["c"].copy_(F.gelu(given["a"], approximate="tanh") * given["b"])


def _geglu_back(given: dict[str, Any]) -> None:
    _gated_back(lambda gate: F.gelu(gate, approximate="tanh"), given["dc"], given["a"], given["b"])


def _gated_back(
    activation: Callable[[Tensor], Tensor], d_out: Tensor, gate: Tensor, up: Tensor
) -> None:
    """Write the gradients of both over them."""
    with torch.enable_grad():
        leaf = gate.detach().clone().requires_grad_()
        activated = activation(leaf)
    (d_gate,) = torch.autograd.grad(activated, leaf, d_out * up)
    up.copy_(d_out * activated.detach())
    gate.copy_(d_gate)


def _rotation(given: dict[str, Any]) -> None:
    half = given["rd"] // 2
    cos, sin = (given[name][..., None, :half] for name in ("cos", "sin"))
    if given["BACKWARD_PASS"]:
        sin = -sin
    for name in ("q_ptr", "k_ptr"):
        heads = given[name]  # (rows, length, heads, width)
        first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = first * cos - second * sin
        heads[..., half : 2 * half] = second * cos + first * sin


SUMS: dict[str, Callable[[dict[str, Any]], None]] = {
    "_rms_norm_forward_kernel": _norm,
    "_rms_norm_backward_kernel": _norm_back,
    "_swiglu_forward_kernel": _swiglu,
    "_swiglu_backward_kernel": _swiglu_back,
    "_geglu_tanh_forward_kernel": _geglu,
    "_geglu_tanh_backward_kernel": _geglu_back,
    "_triton_rope": _rotation,
}
"""What each kernel writes, by its name: where it writes and what it is called are the kernel's."""
