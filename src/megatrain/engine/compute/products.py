"""Products of the layers' linear modules in fp8: `train.products: fp8`.

Inputs and weights are in e4m3, gradients in e5m2, sums in fp32. A linear module makes three
products, all as `left @ right.T` over rows that lie one after another:

    output                 input (tokens, in)        weight (out, in)
    gradient of input      gradient (tokens, out)    weight, turned (in, out)
    gradient of weight     gradient, turned          input, turned

Each side is narrowed before: one scale for the tensor, by its largest element, and a power of two.
So scaling is exact, and what is lost is the format's own rounding, and elements far below the
largest (2^-17 of it in e4m3, 2^-30 in e5m2). torch._scaled_mm multiplies; its results are rounded
to the model's dtype once. The narrowed input is kept for backward, the wide one is not.

Weights are narrowed once for all micro-batches that visit a block, in forward and in backward each,
and dropped when the next block comes. Masters, sums of gradients, the embedding, the head, norms,
attention, routers and experts in one tensor have nothing of this, nor has a module whose width is
not a multiple of 16, as cards want it.

Laws (tests/engine/compute/test_products.py)
    1. A product is that of the narrowed numbers, exact but for the order of its sum; narrowing
       keeps the nearest numbers of the format.
    2. A device that does not multiply fp8 is refused.
    3. A weight is narrowed once per pass over a block, whatever the number of micro-batches.
    4. Lanes, kept activations, tiles and compiled layers give the bits of the reference.
    5. The model on the host is not changed, and only linear modules of layers are: no router.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.devices.device import Device
from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import AdaptedLinear
from megatrain.models.decoder import Decoder
from megatrain.models.multimodal import text_part
from megatrain.step.ops import Op, OpKind

Count = Callable[[Tensor, str], Tensor]
"""Counts the memory of a tensor until nothing uses it (devices/device.py)."""
MULTIPLE = 16
"""Cards multiply fp8 matrices of such widths."""
_DEEPEST_SHIFT = 126
"""fp32 has 2 to this power, and its inverse."""


class Narrowed(NamedTuple):
    """A matrix in fp8: `values` times `unit`."""

    values: Tensor
    unit: Tensor
    """A power of two, fp32, without dimensions."""


class Format(NamedTuple):
    dtype: torch.dtype
    top: int
    """Elements are scaled to below 2^top."""


E4M3 = Format(torch.float8_e4m3fn, 8)
E5M2 = Format(torch.float8_e5m2, 15)


def narrowed(tensor: Tensor, form: Format) -> Narrowed:
    """Return the tensor in a format. Nothing is asked of the device.

    With an element that is not finite none is: a cast to fp8 may make a number of it.
    """
    largest = torch.linalg.vector_norm(tensor, float("inf")).float()
    exponent = torch.frexp(largest).exponent  # the largest is below 2^exponent
    shift = (form.top - exponent).clamp(-_DEEPEST_SHIFT, _DEEPEST_SHIFT)
    scale = torch.ldexp(largest * 0 + 1, shift)
    return Narrowed((tensor * scale).to(form.dtype), scale.reciprocal())


def _turned(given: Narrowed) -> Narrowed:
    """Return the transposed matrix, its rows filled up with zeros to what cards multiply."""
    bits = given.values.view(torch.uint8)
    missing = -bits.shape[0] % MULTIPLE
    turned = torch.nn.functional.pad(bits.t(), (0, missing)) if missing else bits.t().contiguous()
    return Narrowed(turned.view(given.values.dtype), given.unit)


def product(left: Narrowed, right: Narrowed, dtype: torch.dtype) -> Tensor:
    """Return left @ right.T, rounded to `dtype` once."""
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.unit,
        scale_b=right.unit,
        out_dtype=dtype,
        use_fast_accum=False,  # it would sum up in fewer bits
    )


def require_fp8(device: Device) -> None:
    """Raise ConfigError unless torch multiplies fp8 on the device."""
    if why := why_not_fp8(device.place(torch.empty(0)).device):
        raise ConfigError(
            f"train.products is fp8, which {device.name} does not multiply ({why}). Set "
            "train.products to plain."
        )


def why_not_fp8(device: torch.device) -> str:
    """Return why torch does not multiply some pair of formats on the device; empty: it does all.

    In its own words: cards before compute capability 8.9 have no such products, and AMD's MI300 has
    them for formats of its own.
    """
    ones = torch.ones((MULTIPLE, MULTIPLE), dtype=torch.bfloat16, device=device)
    try:
        for form in (E4M3, E5M2):
            product(narrowed(ones, form), narrowed(ones, E4M3), torch.bfloat16)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:  # NotImplementedError is one too
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


# The operations: a graph of torch.compile does not look into them.


@torch.library.custom_op("megatrain::narrow_product", mutates_args=())
def narrow_product(given: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return given @ weight.T, and `given` as it was narrowed. (tokens, in), (out, in)"""
    inputs = narrowed(given, E4M3)
    output = product(inputs, _weight(weight, turned=False), given.dtype)
    return output, inputs.values, inputs.unit


@narrow_product.register_fake
def _(given: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        given.new_empty((given.shape[0], weight.shape[0])),
        given.new_empty(given.shape, dtype=E4M3.dtype),
        given.new_empty((), dtype=torch.float32),
    )


@torch.library.custom_op("megatrain::narrow_product_backward", mutates_args=())
def _go_back(
    d_output: Tensor,
    weight: Tensor,
    values: Tensor,
    unit: Tensor,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight; one that is not wanted is empty."""
    d_input, d_weight = d_output.new_empty(0), d_output.new_empty(0)
    d_narrow = narrowed(d_output, E5M2)
    if wants_input:
        d_input = product(d_narrow, _weight(weight, turned=True), d_output.dtype)
    if wants_weight:
        d_weight = product(_turned(d_narrow), _turned(Narrowed(values, unit)), d_output.dtype)
    return d_input, d_weight


@_go_back.register_fake
def _(
    d_output: Tensor,
    weight: Tensor,
    values: Tensor,
    unit: Tensor,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    return (
        d_output.new_empty((d_output.shape[0], weight.shape[1]) if wants_input else (0,)),
        d_output.new_empty(weight.shape if wants_weight else (0,)),
    )


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
    _, values, unit = output
    ctx.mark_non_differentiable(values, unit)
    ctx.save_for_backward(inputs[1], values, unit)


def _back(ctx: Any, d_output: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None]:
    wants_input, wants_weight = ctx.needs_input_grad
    found = _go_back(d_output.contiguous(), *ctx.saved_tensors, wants_input, wants_weight)
    return found[0] if wants_input else None, found[1] if wants_weight else None


narrow_product.register_autograd(_back, setup_context=_keep)


# Weights, narrowed once for a visit of their block.


class NarrowWeights:
    """The narrowed weights of the block that compute is at."""

    def __init__(self, counted: Count) -> None:
        self._counted = counted
        self._at: tuple[OpKind, int | None] | None = None
        self._made: dict[tuple[int, bool], Narrowed] = {}
        """Narrowed weights, by address and whether they are transposed."""
        self._held: list[Tensor] = []
        """Those weights: no other may come to their addresses meanwhile."""

    @contextmanager
    def visited(self, op: Op) -> Iterator[None]:
        """Let products that this thread makes meanwhile use weights narrowed by earlier ops.

        Ops of one kind on one block have the same weights, as long as no other comes between.
        """
        if self._at != (op.kind, op.block):
            self._made.clear()
            self._held.clear()
            self._at = op.kind, op.block
        _now.weights = self
        try:
            yield
        finally:
            _now.weights = None

    def of(self, weight: Tensor, *, turned: bool) -> Narrowed:
        """Return a weight of the block, narrowed now or before."""
        key = weight.data_ptr(), turned
        if key not in self._made:
            made = self._made.get((key[0], False)) or narrowed(weight, E4M3)
            self._made[key] = made = _turned(made) if turned else made
            self._counted(made.values, "narrow weights")
            self._held.append(weight)
        return self._made[key]


class _Now(threading.local):
    weights: NarrowWeights | None = None
    """Weights of the engine whose op this thread runs; None: a module is called by itself."""


_now = _Now()


def _weight(weight: Tensor, *, turned: bool) -> Narrowed:
    if _now.weights is not None:
        return _now.weights.of(weight, turned=turned)
    made = narrowed(weight, E4M3)
    return _turned(made) if turned else made


# The modules.


class NarrowLinear(nn.Linear):
    """A linear module whose products are narrow: the first base of a module's new class."""

    def forward(self, given: Tensor) -> Tensor:
        flat = given.reshape(-1, given.shape[-1])
        output: Tensor = narrow_product(flat.contiguous(), self.weight)[0]
        output = output.view(*given.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def narrow_products(model: PreTrainedModel, decoder: Decoder) -> list[str]:
    """Let linear modules of the layers of `model`, a copy of the decoder's, multiply in fp8.

    Returns their names.
    """
    experts = _numbers_of_experts(model)
    found = []
    for name, module in model.get_submodule(decoder.layers_path).named_modules():
        if type(module) is not nn.Linear and not _is_adapted(module):
            continue
        assert isinstance(module, nn.Linear)
        widths = module.weight.shape
        fits = module.weight.dtype is torch.bfloat16 and not any(w % MULTIPLE for w in widths)
        if fits and widths[0] not in experts:
            module.__class__ = _narrow_class(type(module))  # type: ignore[arg-type]  # hashable
            found.append(name)
    return found


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(module, AdaptedLinear) and nn.Linear in type(module).__bases__


def _numbers_of_experts(model: PreTrainedModel) -> set[int]:
    """Return the numbers of experts that the config names: routers have as many outputs."""
    facts = text_part(model.config).to_dict()
    return {value for name, value in facts.items() if "expert" in name and type(value) is int}


@cache
def _narrow_class(kind: type[nn.Linear]) -> type[nn.Linear]:
    """Return the class with NarrowLinear in front of nn.Linear: what is before it stays there."""
    if kind is nn.Linear:
        return NarrowLinear
    bases = [(NarrowLinear,) if base is nn.Linear else (base,) for base in kind.__bases__]
    return type(f"Narrow{kind.__name__}", sum(bases, ()), {})
