"""Widening: the weights of a narrow param (megatrain/narrow.py), by the arithmetic of its form.

    fp8, fp4   values times scales in fp32, rounded once, as transformers does
    mxfp4      a table of 256 exponents by 256 bytes gives two weights, and each matrix is turned
    int4       values times scales, rounded to the dtype of the scales, as compressed-tensors does
    nf4        codes times scales in fp32, rounded once, as bitsandbytes does

One arithmetic for all: a folder that is widened while it is loaded, a slot of a device, and an
export. Every step of it is exact, or rounds once as IEEE 754 says, so all devices give the same
bits. Work goes by AT_ONCE elements, which bounds what is held beside the result.

Laws (tests/models/test_widening.py; against bitsandbytes: proofs/narrow)
    1. Whatever the number of elements at once, the bits are the same.
    2. Weights are those of transformers, compressed-tensors and bitsandbytes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from megatrain.narrow import NF4_BLOCK, NF4_SCALES_BLOCK, Form, Matrices, Spot

AT_ONCE = 1 << 22
"""Elements that are widened by one call: 16 MiB in fp32."""
GROUP = 32
"""Values that share an exponent in mxfp4."""
EXPONENT_BIAS = 127
INT4_ZERO = 8
# E2M1: sign, two bits of exponent, one of mantissa.
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Quantiles of a normal distribution, as the paper of QLoRA has them, in fp32.
_NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

Place = Callable[[Tensor], Tensor]
"""Returns a copy of a small tensor on a device."""


class Widener:
    """Widens params on one device. Its tables stay there."""

    def __init__(self, place: Place = lambda table: table) -> None:
        self._place = place
        self._tables: dict[str, Tensor] = {}

    def prepare(self, form: Form) -> None:
        """Place the tables of a form. Not inside an op: the caller waits for them."""
        for matrices in form:
            for name in _TABLES.get(matrices.method, ()):
                if name not in self._tables:
                    self._tables[name] = self._place(_MADE[name]())

    def widen(self, form: Form, narrow: Tensor, into: Tensor) -> None:
        """Write the weights of a param, flat, from its bytes. The form has been prepared."""
        start = first = 0
        for matrices in form:
            data = narrow[start : start + matrices.num_bytes]
            target = into[first : first + matrices.num_elements]
            self._widen(matrices, data, target)
            start += matrices.num_bytes
            first += matrices.num_elements

    def _widen(self, matrices: Matrices, data: Tensor, into: Tensor) -> None:
        arrays = {name: _numbers(data, matrices, name) for name in matrices.arrays}
        if matrices.method == "nf4":
            self._widen_nf4(matrices, arrays, into.view(matrices.count, -1))
            return
        shape = (matrices.count, matrices.rows, matrices.columns)
        if matrices.is_transposed:
            shape = (matrices.count, matrices.columns, matrices.rows)
        target = into.view(shape)
        values = arrays["values"].view(matrices.count, matrices.rows, matrices.row_bytes)
        scales = arrays["scales"].view(matrices.count, *matrices.grid)
        step = matrices.block[0]
        for some, rows in _pieces(matrices):
            blocks = slice(rows.start // step, -(-rows.stop // step))
            weights = self.rows(matrices, values[some, rows], scales[some, blocks], rows.start)
            if matrices.is_transposed:
                target[some, :, rows].copy_(weights.transpose(1, 2))
            else:
                target[some, rows].copy_(weights)

    def rows(self, matrices: Matrices, values: Tensor, scales: Tensor, first: int) -> Tensor:
        """Return rows of some matrices, from row `first` on: (matrices, rows, columns).

        `scales` are those of the blocks that have these rows.
        """
        shape = (*values.shape[:2], matrices.columns)
        match matrices.method:
            case "mxfp4":
                index = scales.unsqueeze(-1).int() * 256 + values.reshape(*scales.shape, -1)
                return self._tables["mxfp4"][index].view(torch.bfloat16).view(shape)
            case "int4":
                unpacked = _low_first(values).float().sub_(INT4_ZERO).view(shape)
                return scale_rows(unpacked, scales, matrices.block, first).to(scales.dtype)
            case "fp4":
                table = self._tables["fp4"]
                return scale_rows(
                    table[_low_first(values).int()].view(shape), scales, matrices.block, first
                )
            case _:
                weights = values.view(torch.float8_e4m3fn).float()
                return scale_rows(weights, scales, matrices.block, first)

    def _widen_nf4(self, matrices: Matrices, arrays: dict[str, Tensor], into: Tensor) -> None:
        size, codes = matrices.matrix_elements, self._tables["nf4"]
        count = max(1, AT_ONCE // size)
        for first in range(0, matrices.count, count):
            some = slice(first, min(first + count, matrices.count))
            scales = self._tables["dynamic"][arrays["scales"][some].int()]
            shared = arrays["scales_of_scales"][some].repeat_interleave(NF4_SCALES_BLOCK, dim=1)
            scales = scales.mul_(shared[:, : scales.shape[1]]).add_(arrays["offset"][some])
            for start in range(0, size, AT_ONCE):
                stop = min(start + AT_ONCE, size)
                packed = arrays["values"][some, start // 2 : -(-stop // 2)]
                pair = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)
                weights = codes[pair[:, : stop - start].int()]
                blocks = slice(start // NF4_BLOCK, -(-stop // NF4_BLOCK))
                factors = scales[:, blocks].repeat_interleave(NF4_BLOCK, dim=1)
                weights.mul_(factors[:, : stop - start])
                into[some, start:stop].copy_(weights)


def scale_rows(weights: Tensor, scales: Tensor, block: tuple[int, int], first: int) -> Tensor:
    """Multiply (matrices, rows, columns) in fp32 by the scales of their blocks, in place.

    `first` is the number of the first row; `scales` begin with the block that has it.
    """
    step, width = block
    if scales.dtype is torch.uint8:
        scales = (scales.float() - EXPONENT_BIAS).exp2()
    numbers = torch.arange(first, first + weights.shape[1], device=weights.device)
    factors = scales.float()[:, numbers // step - first // step]  # (matrices, rows, blocks)
    whole = weights.shape[2] // width
    blocks = torch.unflatten(weights[..., : whole * width], 2, (whole, width))
    blocks.mul_(factors[..., :whole, None])
    if whole * width < weights.shape[2]:
        weights[..., whole * width :].mul_(factors[..., whole:])
    return weights


def _pieces(matrices: Matrices) -> Iterator[tuple[slice, slice]]:
    """Yield some matrices and some of their rows: AT_ONCE elements, or one row if that has more."""
    count = max(1, AT_ONCE // matrices.matrix_elements)
    step = max(1, AT_ONCE // matrices.columns) if count == 1 else matrices.rows
    for first in range(0, matrices.count, count):
        some = slice(first, min(first + count, matrices.count))
        for row in range(0, matrices.rows, step):
            yield some, slice(row, min(row + step, matrices.rows))


def _numbers(data: Tensor, matrices: Matrices, name: str) -> Tensor:
    """Return an array of some matrices: (matrices, numbers of one)."""
    array = matrices.arrays[name]
    dtype = getattr(torch, array.dtype)
    return data[array.start : array.stop].view(dtype).view(array.count, array.size)


def _low_first(packed: Tensor) -> Tensor:
    """Return the two values of each byte, the lower bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@cache
def fp4_table() -> Tensor:
    """Return the values of four bits, in fp32."""
    return torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])


@cache
def mxfp4_table() -> Tensor:
    """Return for each exponent and byte its two weights in bf16, as one number of 32 bits."""
    pairs = torch.empty(256, 2)
    pairs[:, 0] = fp4_table()[torch.arange(256) & 15]
    pairs[:, 1] = fp4_table()[torch.arange(256) >> 4]
    exponents = torch.arange(256, dtype=torch.int32) - EXPONENT_BIAS
    table = torch.ldexp(pairs.expand(256, 256, 2), exponents[:, None, None]).bfloat16()
    return table.view(torch.int32).view(-1)


@cache
def nf4_table() -> Tensor:
    """Return the values of the codes of nf4, in fp32, ascending."""
    return torch.tensor(_NF4_VALUES)


@cache
def dynamic_table() -> Tensor:
    """Return the 256 values of scales' scales, ascending.

    The dynamic tree of 8-bit Adam: for each of seven powers of ten the means of equal parts of
    0.1 to 1, twice as many as for the power below it, with both signs; and 0 and 1.
    """
    found = [0.0, 1.0]
    for power in range(7):
        bounds = torch.linspace(0.1, 1, 2**power + 1)
        means = (bounds[:-1] + bounds[1:]) / 2.0
        scale = 10 ** (power - 6)
        found += (scale * means).tolist() + (-scale * means).tolist()
    return torch.tensor(sorted(found))


_MADE = {
    "fp4": fp4_table, "mxfp4": mxfp4_table, "nf4": nf4_table, "dynamic": dynamic_table,
}  # fmt: skip
_TABLES = {"fp4": ("fp4",), "mxfp4": ("mxfp4",), "nf4": ("nf4", "dynamic")}


@cache
def _on_host() -> Widener:
    return Widener()


def host_widener(form: Form) -> Widener:
    """Return what widens a form in host memory."""
    widener = _on_host()
    widener.prepare(form)
    return widener


def widened(form: Form, narrow: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the weights of a narrow param in host memory."""
    weights = torch.empty(shape, dtype=dtype)
    host_widener(form).widen(form, narrow, weights.view(-1))
    return weights


def widened_matrix(spot: Spot, narrow: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one matrix of a narrow param in host memory, flat, as the model has it."""
    alone = replace(spot.matrices, count=1)
    data = torch.empty(alone.num_bytes, dtype=torch.uint8)
    for name, array in alone.arrays.items():
        here = spot.array_bytes(name)
        data[array.start : array.stop] = narrow[here.start : here.stop]
    return widened((alone,), data, (alone.matrix_elements,), dtype)
