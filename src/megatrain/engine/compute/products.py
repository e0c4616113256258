"""Products of the layers' linear modules in fewer bits: `train.products`.

    plain       the model's own code
    fp8         inputs and weights in e4m3, gradients in e5m2, sums in fp32
    fp16_sums   all three in fp16, sums in fp16: cards of the GeForce series have twice the rate

A linear module makes three products, all as `left @ right.T` over rows that lie one after another:

    output                 input (tokens, in)        weight (out, in)
    gradient of input      gradient (tokens, out)    weight, turned (in, out)
    gradient of weight     gradient, turned          input, turned

Each side is narrowed before: one scale for the tensor, by its largest element, and a power of two.
So scaling is exact, and what is lost is the format's own rounding, and elements far below the
largest (2^-17 of it in e4m3, 2^-30 in e5m2 and at least 2^-24 in fp16). In fp16 scales leave room
for the sum of as many products of the largest elements as there are: no sum can overflow. Results
are rounded to the model's dtype once. The narrowed input is kept for backward, the wide one is not.

Weights are narrowed once for all micro-batches that visit a block, in forward and in backward each,
and dropped when the next block comes. Masters, sums of gradients, the embedding, the head, norms,
attention, routers and experts in one tensor have nothing of this, nor has a module whose width is
not a multiple of 16, as cards want it.

A device is asked whether it multiplies fp8, by a product. One that does not, and the CPU always,
widens both sides to fp32 and multiplies them: the same numbers, slower. Sums in fp16 are CUDA's;
elsewhere they are added up by 16 products at a time, as one instruction of a card does.

Laws (tests/engine/compute/test_products.py)
    1. A product is that of the narrowed numbers, exact but for the order of its sum; narrowing
       keeps the nearest numbers of the format.
    2. The widened product and torch's own for fp8 agree to the last bit of fp32's sums.
    3. A weight is narrowed once per pass over a block, whatever the number of micro-batches.
    4. Lanes, kept activations, tiles and compiled layers give the bits of the reference.
    5. The model on the host is not changed, and only linear modules of layers are: no router.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.models.adapters.lora import AdaptedLinear
from megatrain.models.decoder import Decoder
from megatrain.models.multimodal import text_part
from megatrain.step.ops import Op, OpKind

Products = Literal["plain", "fp8", "fp16_sums"]
Count = Callable[[Tensor, str], Tensor]
"""Counts the memory of a tensor until nothing uses it (devices/device.py)."""
MULTIPLE = 16
"""Cards multiply fp8 matrices of such widths."""
_DEEPEST_SHIFT = 126
"""fp32 has 2 to this power, and its inverse."""
_PER_INSTRUCTION = 16
"""Products that a card sums up before it rounds to fp16."""
_FP16_TOP = 15
"""Sums below 2^15 are finite in fp16, rounding included."""


class Narrowed(NamedTuple):
    """A matrix in fewer bits: `values` times `unit`."""

    values: Tensor
    unit: Tensor
    """A power of two, fp32, without dimensions."""


class _Format(NamedTuple):
    dtype: torch.dtype
    top: int
    """Elements are scaled to below 2^top."""


_E4M3 = _Format(torch.float8_e4m3fn, 8)
_E5M2 = _Format(torch.float8_e5m2, 15)


def _fp16(num_summed: int) -> _Format:
    """Return the format whose products, so many in a sum, stay finite."""
    return _Format(torch.float16, (_FP16_TOP - (num_summed - 1).bit_length()) // 2)


def format_of(kind: str, num_summed: int) -> _Format:
    """Return the format of inputs and weights whose products, so many, are summed up."""
    return _E4M3 if kind == "fp8" else _fp16(num_summed)


def narrowed(tensor: Tensor, form: _Format) -> Narrowed:
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
    values = given.values
    bits = values.view(torch.uint8 if values.itemsize == 1 else torch.int16)
    missing = -bits.shape[0] % MULTIPLE
    turned = torch.nn.functional.pad(bits.t(), (0, missing)) if missing else bits.t().contiguous()
    return Narrowed(turned.view(values.dtype), given.unit)


def product(left: Narrowed, right: Narrowed, dtype: torch.dtype) -> Tensor:
    """Return left @ right.T, rounded to `dtype` once."""
    if left.values.dtype is torch.float16:
        sums = _summed_in_fp16(left.values, right.values)
        return sums.to(dtype) * (left.unit * right.unit).to(dtype)
    if multiplies_fp8(left.values.device):
        return _scaled_product(left, right, dtype)
    sums = left.values.float() @ right.values.float().t()
    return (sums * (left.unit * right.unit)).to(dtype)


def _scaled_product(left: Narrowed, right: Narrowed, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.unit,
        scale_b=right.unit,
        out_dtype=dtype,
        use_fast_accum=False,  # it would sum up in fewer bits
    )


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Return whether products of fp8 are the device's own. The CPU always widens."""
    return device.type != "cpu" and takes_fp8(device)


def takes_fp8(device: torch.device) -> bool:
    """Return whether torch multiplies each pair of formats on the device."""
    ones = torch.ones((MULTIPLE, MULTIPLE), dtype=torch.bfloat16, device=device)
    try:
        for form in (_E4M3, _E5M2):
            _scaled_product(narrowed(ones, form), narrowed(ones, _E4M3), torch.bfloat16)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError):  # NotImplementedError is one too
        return False
    return True


def sums_in_fp16(device: torch.device) -> bool:
    """Return whether torch lets products of the device add up in fp16."""
    return device.type == "cuda"


def _summed_in_fp16(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.T with sums in fp16."""
    if sums_in_fp16(left.device):
        switches: Any = torch.backends.cuda.matmul
        before = switches.allow_fp16_accumulation
        switches.allow_fp16_accumulation = True
        try:
            return left @ right.t()
        finally:
            switches.allow_fp16_accumulation = before
    sums = left.new_zeros(left.shape[0], right.shape[0])
    sides = (torch.split(side.float(), _PER_INSTRUCTION, 1) for side in (left, right))
    for some, others in zip(*sides, strict=True):
        sums = (sums.float() + some @ others.t()).half()
    return sums


# The operations: a graph of torch.compile does not look into them.


@torch.library.custom_op("megatrain::narrow_product", mutates_args=())
def narrow_product(given: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return given @ weight.T, and `given` as it was narrowed. (tokens, in), (out, in)"""
    form = format_of(kind, given.shape[1])
    inputs = narrowed(given, form)
    output = product(inputs, _weight(weight, form, turned=False), given.dtype)
    return output, inputs.values, inputs.unit


@narrow_product.register_fake
def _(given: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _E4M3.dtype if kind == "fp8" else torch.float16
    return (
        given.new_empty((given.shape[0], weight.shape[0])),
        given.new_empty(given.shape, dtype=dtype),
        given.new_empty((), dtype=torch.float32),
    )


@torch.library.custom_op("megatrain::narrow_product_backward", mutates_args=())
def _go_back(
    d_output: Tensor,
    weight: Tensor,
    values: Tensor,
    unit: Tensor,
    kind: str,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight; one that is not wanted is empty."""
    dtype, (tokens, width) = d_output.dtype, d_output.shape
    d_input, d_weight = d_output.new_empty(0), d_output.new_empty(0)
    narrow = None if kind == "fp16_sums" else narrowed(d_output, _E5M2)
    if wants_input:
        form = format_of(kind, width)
        d_narrow = narrow or narrowed(d_output, form)
        d_input = product(d_narrow, _weight(weight, form, turned=True), dtype)
    if wants_weight:
        # As many tokens may be in a sum as the input was scaled for, and no more.
        d_narrow = narrow or narrowed(d_output, _fp16_beside(values.shape[1], tokens))
        d_weight = product(_turned(d_narrow), _turned(Narrowed(values, unit)), dtype)
    return d_input, d_weight


def _fp16_beside(scaled_for: int, num_summed: int) -> _Format:
    """Return the format of gradients whose products with such an input, so many, stay finite."""
    return _Format(torch.float16, _FP16_TOP - (num_summed - 1).bit_length() - _fp16(scaled_for).top)


@_go_back.register_fake
def _(
    d_output: Tensor,
    weight: Tensor,
    values: Tensor,
    unit: Tensor,
    kind: str,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    return (
        d_output.new_empty((d_output.shape[0], weight.shape[1]) if wants_input else (0,)),
        d_output.new_empty(weight.shape if wants_weight else (0,)),
    )


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: tuple[Tensor, ...]) -> None:
    _, weight, ctx.kind = inputs
    _, values, unit = output
    ctx.mark_non_differentiable(values, unit)
    ctx.save_for_backward(weight, values, unit)


def _back(ctx: Any, d_output: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    wants_input, wants_weight, _ = ctx.needs_input_grad
    found = _go_back(d_output.contiguous(), *ctx.saved_tensors, ctx.kind, wants_input, wants_weight)
    return found[0] if wants_input else None, found[1] if wants_weight else None, None


narrow_product.register_autograd(_back, setup_context=_keep)


# Weights, narrowed once for a visit of their block.


class NarrowWeights:
    """The narrowed weights of the block that compute is at."""

    def __init__(self, counted: Count) -> None:
        self._counted = counted
        self._at: tuple[OpKind, int | None] | None = None
        self._made: dict[tuple[int, _Format, bool], Narrowed] = {}
        """Narrowed weights, by address, format, and whether they are transposed."""
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

    def of(self, weight: Tensor, form: _Format, *, turned: bool) -> Narrowed:
        """Return a weight of the block, narrowed now or before."""
        key = weight.data_ptr(), form, turned
        if key not in self._made:
            made = self._made.get((key[0], form, False)) or narrowed(weight, form)
            self._made[key] = made = _turned(made) if turned else made
            self._counted(made.values, "narrow weights")
            self._held.append(weight)
        return self._made[key]


class _Now(threading.local):
    weights: NarrowWeights | None = None
    """Weights of the engine whose op this thread runs; None: a module is called by itself."""


_now = _Now()


def _weight(weight: Tensor, form: _Format, *, turned: bool) -> Narrowed:
    if _now.weights is not None:
        return _now.weights.of(weight, form, turned=turned)
    made = narrowed(weight, form)
    return _turned(made) if turned else made


# The modules.


class NarrowLinear(nn.Linear):
    """A linear module whose products are narrow: the first base of a module's new class."""

    narrow_kind: str

    def forward(self, given: Tensor) -> Tensor:
        flat = given.reshape(-1, given.shape[-1])
        output: Tensor = narrow_product(flat.contiguous(), self.weight, self.narrow_kind)[0]
        output = output.view(*given.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def narrow_products(model: PreTrainedModel, decoder: Decoder, kind: Products) -> list[str]:
    """Let linear modules of the layers of `model`, a copy of the decoder's, multiply so.

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
            module.narrow_kind = kind  # type: ignore[assignment]  # a class that has it
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
