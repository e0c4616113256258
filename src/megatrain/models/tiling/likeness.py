"""A layer with weights that cost nothing, to learn how it treats tokens.

The skeleton has no weights, and a layer can have billions of them. How it treats tokens does not
depend on their values: so small params are drawn at random, and large ones are stand-ins, one zero
expanded, whose products are computed as if the weight had rank one. Tokens stay as apart in
such a product as in the true one, and nothing is as large as the weight. All in fp32.

Laws (tests/models/tiling/test_probe.py)
    1. Of a layer of any size, learning needs no more memory than its small params and a few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 1 << 18
"""Elements. A param of more is a stand-in."""
_aten = torch.ops.aten


def likeness(layer: nn.Module) -> dict[str, Tensor]:
    """Return params and buffers of a layer like `layer`, in fp32."""
    generator = torch.Generator().manual_seed(0)
    zero = torch.zeros(())
    weights = {
        name: zero.expand(param.shape) if param.numel() > LARGE else _drawn(param, generator)
        for name, param in layer.named_parameters()
    }
    buffers = {name: in_fp32(buffer) for name, buffer in layer.named_buffers()}
    return weights | buffers


def in_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor of numbers in fp32, any other as it is."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _drawn(param: Tensor, generator: torch.Generator) -> Tensor:
    if param.dim() < 2:
        return torch.rand(param.shape, generator=generator) + 0.5
    return torch.randn(param.shape, generator=generator).div_(math.sqrt(param.shape[-1]))


@contextmanager
def products_of_stand_ins() -> Iterator[None]:
    """Compute products with stand-ins as if they had rank one; without gradients."""
    with torch.no_grad(), _Products():  # type: ignore[no-untyped-call]
        yield


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = _FIRST_FACTOR.get(func)
        if number is None or not any(map(_is_stand_in, args[number : number + 2])):
            return func(*args, **(kwargs or {}))
        product = _product(args[number], args[number + 1])
        return product + args[0] if number else product


_FIRST_FACTOR: dict[Callable[..., Any], int] = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten._grouped_mm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
"""By operation, the place of the first factor among its arguments."""


def _is_stand_in(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a product of which one factor is a stand-in, (..., i, k) and (..., k, o)."""
    if _is_stand_in(a):
        return _product(b.transpose(-1, -2), a.transpose(-1, -2)).transpose(-1, -2)
    return (a @ _line(b, -2))[..., None] * _line(b, -1)


def _line(tensor: Tensor, dim: int) -> Tensor:
    """Return one number for each place of a dimension."""
    size = tensor.shape[dim]
    return torch.arange(1, size + 1, dtype=torch.float32).cos().div_(math.sqrt(size))
