"""LoRA beside params that are not the weight of a linear module: experts that share one tensor.

    W[e] + (alpha / rank) B[e] A[e]        for each expert e: W frozen; A, B trained

These are PEFT's `target_parameters`. Names and layouts of A and B are one's own and PEFT's:

    model.layers.0.mlp.experts.gate_up_proj           (experts, out, in)       of the folder
    model.layers.0.mlp.experts.gate_up_proj_lora_A    (experts x rank, in)     expert by expert
    model.layers.0.mlp.experts.gate_up_proj_lora_B    (out, rank x experts)    rank by rank

A module that calls itself transposed keeps (experts, in, out). A matrix, of a router say, is one
expert.

The module's own code runs. For the time of a call it finds an `AdaptedWeight` in place of the
param, which multiplies rows by W, and then by A and B: nothing as large as W is made, neither for
a product nor for a gradient. An operation that is not a product gets W + (alpha / rank) B A, as
PEFT computes it always: right with any code, at the price of one more tensor of that size. So do
layers that torch compiles.

Laws (tests/models/adapters/test_params.py; against PEFT: proofs/adapters)
    1. Products with an adapted weight are those with W + (alpha / rank) B A, within rounding, and
       so are gradients.
    2. A product makes no tensor of the size of W.
    3. A module has its own params again after a call, whether it ends well or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_GRANULE = 8
"""Grouped products want rows of 16 bytes: ranks are filled up with zeros to a multiple of it."""


class AdaptedWeight:
    """`weight + scaling * left @ right`, (..., m, n): for torch's products a tensor."""

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor, scaling: float) -> None:
        self.weight = weight
        self.left = left  # (..., m, rank)
        self.right = right  # (..., rank, n)
        self.scaling = scaling

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def mT(self) -> AdaptedWeight:  # noqa: N802  (torch's name)
        return AdaptedWeight(self.weight.mT, self.right.mT, self.left.mT, self.scaling)

    def transpose(self, first: int, second: int) -> Any:
        """Return it with two dimensions exchanged."""
        dims = self.weight.dim()
        if {first % dims, second % dims} == {dims - 2, dims - 1}:
            return self.mT
        return self.whole().transpose(first, second)

    def __getitem__(self, index: Any) -> Any:
        if self.weight.dim() != 3 or not isinstance(index, int | slice | Tensor):
            return self.whole()[index]
        parts = (self.weight[index], self.left[index], self.right[index])
        return AdaptedWeight(*parts, self.scaling)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def whole(self) -> Tensor:
        """Return it as one tensor."""
        if self.weight.dim() != 3:
            return self.weight + (self.left @ self.right) * self.scaling
        return torch.baddbmm(self.weight, self.left, self.right, alpha=self.scaling)

    def beside(
        self, own: Tensor, rows: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return `own`, the product of rows and `weight`, with the low-rank one added."""
        inner = multiply(rows.to(self.left.dtype), self.left)
        return own + (multiply(inner, self.right) * self.scaling).to(own.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_product(func, args):
            args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
            return func(*args, **kwargs)
        rows, adapted, *rest = args
        own = func(rows, adapted.weight, *rest, **kwargs)
        if func is F.linear:
            return adapted.mT.beside(own, rows, torch.matmul)
        if func is torch._grouped_mm:
            adapted = adapted._filled_up()
            groups = {name: value for name, value in kwargs.items() if name == "offs"}
            return adapted.beside(own, rows, lambda a, b: func(a, b, **groups))
        return adapted.beside(own, rows, func)

    def _filled_up(self) -> AdaptedWeight:
        more = -self.right.shape[-2] % _GRANULE
        left, right = F.pad(self.left, (0, more)), F.pad(self.right, (0, 0, 0, more))
        return AdaptedWeight(self.weight, left, right, self.scaling)


_PRODUCTS = (F.linear, torch.matmul, torch.mm, torch.bmm, Tensor.matmul, torch._grouped_mm)


def _is_product(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether rows are multiplied by an adapted weight."""
    return (
        func in _PRODUCTS
        and len(args) > 1
        and isinstance(args[0], Tensor)
        and isinstance(args[1], AdaptedWeight)
    )


class AdaptedParams(nn.Module):
    """A module with low-rank products beside some of its params: the first base of its class."""

    lora_scalings: dict[str, float]
    """The factors of the products, by the name of the param."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own code computes with the sums in place of these params."""
        own = {name: self._parameters[name] for name in self.lora_scalings}
        adapted = {name: _adapted_weight(self, name) for name in own}
        compiles = torch.compiler.is_compiling()
        try:
            for name, weight in adapted.items():
                found: Any = weight.whole() if compiles else weight
                self._parameters[name] = found
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(own)


def _adapted_weight(module: AdaptedParams, name: str) -> AdaptedWeight:
    weight: Any = module._parameters[name]
    a, b = (module._parameters[f"{name}_lora_{half}"] for half in "AB")
    left, right = factors(weight.shape, a, b, is_transposed=is_transposed(module))
    left, right = left.to(weight.dtype), right.to(weight.dtype)
    return AdaptedWeight(weight, left, right, module.lora_scalings[name])


def factors(
    shape: torch.Size, a: Any, b: Any, *, is_transposed: bool, experts: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Return two factors, (experts, m, rank) and (experts, rank, n), of a change of such a param.

    Those of a matrix are (m, rank) and (rank, n).
    """
    if len(shape) == 2:
        return b, a
    a = a.view(shape[0], -1, a.shape[1])[experts]  # (experts, rank, in)
    b = b.view(b.shape[0], -1, shape[0])[..., experts].permute(2, 0, 1).contiguous()
    return (a.mT, b.mT) if is_transposed else (b, a)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module says that it keeps (experts, in, out), as PEFT asks it."""
    return bool(getattr(module, "is_transposed", False))


def is_experts(module: nn.Module, param: Tensor) -> bool:
    """Return whether a param of a module has a matrix for each of several experts."""
    return param.dim() == 3 and type(module).__name__.endswith("Experts")


def adapt_param(
    module: Any, name: str, rank: int, scaling: float, dtype: torch.dtype | None = None
) -> None:
    """Give a param of a module its adapter, in its own dtype or another."""
    weight = module._parameters[name]
    num_experts = weight.shape[0] if weight.dim() == 3 else 1
    wide, narrow = weight.shape[-2:]
    if weight.dim() == 3 and is_transposed(module):
        wide, narrow = narrow, wide
    if not isinstance(module, AdaptedParams):
        module.__class__ = adapted_class(AdaptedParams, type(module))  # type: ignore[arg-type]
        module.lora_scalings = {}
    module.lora_scalings[name] = scaling
    shapes = {"A": (num_experts * rank, narrow), "B": (wide, rank * num_experts)}
    for half, shape in shapes.items():
        made = nn.Parameter(weight.new_empty(shape, dtype=dtype or weight.dtype))
        module.register_parameter(f"{name}_lora_{half}", made)


@cache
def adapted_class(first: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that is of a kind, and of another kind before."""
    return type(f"Adapted{kind.__name__}", (first, kind), {})
