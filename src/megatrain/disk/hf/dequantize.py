"""Quantized tensors of a folder: values and their scales, dequantized piece by piece.

    fp8      X, X_scale_inv     E4M3 values, or two 4-bit values to a byte, of any matrix; a scale
                                for each block of rows and columns, or one for the matrix
    mxfp4    X_blocks, X_scales   experts x rows x groups of 32 values in 16 bytes, and an exponent
                                for each group; the model has every expert transposed
    int4     X_packed, X_scale, X_shape   eight values to a number of 32 bits, and a scale for each
                                group of a row (compressed-tensors)

models/widening.py has the arithmetic. Under adapters weights may stay as they are, and nothing is
widened here (narrowed.py).

A piece is some whole rows of one matrix with the scales of these rows. A worker reads both into its
buffer and gets weights in the dtype of the model, which is all that the run ever sees: it starts as
from a folder that was dequantized before, to the bit. Where a block of fp8 hangs over the edge of a
matrix, blocks have the size that config.json gives; else they divide the matrix by its scales.

Laws (tests/disk/hf/test_dequantize.py)
    1. Weights have the bits of transformers' own dequantization, whatever the pieces.
    2. Scales that are missing, misshapen, mistyped or left over are named before a byte is read;
       values that are not finite while they are.
    3. A piece takes memory by ELEMENTS_AT_ONCE, not by the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.hf.folder import StoredTensor
from megatrain.disk.hf.safetensors_format import DTYPES
from megatrain.errors import WeightsMismatch, listing
from megatrain.memory.direct import DISK_PAGE, DirectReader
from megatrain.memory.layout import overlap
from megatrain.models.widening import GROUP, host_widener
from megatrain.narrow import Matrices, Method
from megatrain.quantization import Quantization

ELEMENTS_AT_ONCE = 1 << 20
"""Elements of the rows of a piece: in fp32 they take 4 MiB, their scales at most that."""
_LONGEST_ROW = 1 << 20
_VALUES_ROOM = (1 << 20) + 2 * DISK_PAGE
"""The part of a worker's buffer for values; the scales have the rest."""
_GROUP_BYTES = GROUP // 2
_VALUE_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
_SCALE_DTYPES = {name: DTYPES[name] for name in ("F32", "BF16", "F16", "U8")} | {
    "F8_E8M0": torch.float8_e8m0fnu
}
# The names that transformers knows for the scales of `X.weight`.
_OTHER_SCALES = (".scale", ".qscale_weight")
_NOT_WEIGHTS = {"fp8": (".activation_scale",), "int4": (".weight_shape",), "mxfp4": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedValues:
    """Values for the elements of a tensor from `first` on."""

    first: int
    values: Tensor
    stride: int = 0
    """Between the rows of values that have two dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A quantized tensor: many matrices of one shape."""

    values: StoredTensor
    scales: StoredTensor
    method: Method
    num_matrices: int
    rows: int
    columns: int
    block: tuple[int, int] = (1, GROUP)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the model must have."""
        if self.method == "mxfp4":
            return self.num_matrices, self.columns, self.rows
        return (*self.values.entry.shape[:-1], self.columns)

    @property
    def matrices(self) -> Matrices:
        """Its form."""
        scale = str(_SCALE_DTYPES[self.scales.entry.dtype]).removeprefix("torch.")
        return Matrices(
            method=self.method,
            count=self.num_matrices,
            rows=self.rows,
            columns=self.columns,
            block=self.block,
            scale=scale,  # type: ignore[arg-type]
        )

    def values_bytes(self, matrix: int, rows: range) -> range:
        """Return the bytes of the file that have rows of a matrix."""
        size = self.matrices.row_bytes
        begin = self.values.entry.start + (matrix * self.rows + rows.start) * size
        return range(begin, begin + len(rows) * size)

    def scales_bytes(self, matrix: int, rows: range) -> range:
        """Return the bytes of the file that have the scales of a matrix's rows."""
        of_rows, columns = self.matrices.grid
        have = math.prod(self.scales.entry.shape) // (of_rows * columns)
        of_matrix = matrix * of_rows if have > 1 else 0
        first, last = rows.start // self.block[0], (rows.stop - 1) // self.block[0] + 1
        size = columns * _SCALE_DTYPES[self.scales.entry.dtype].itemsize
        begin = self.scales.entry.start + (of_matrix + first) * size
        return range(begin, begin + (last - first) * size)

    def require_finite(self, is_finite: bool, matrix: int, rows: range) -> None:
        """Raise WeightsMismatch unless the weights of these rows are finite."""
        if not is_finite:
            raise WeightsMismatch(
                f"{self.values.entry.name} times {self.scales.entry.name} is not finite in rows "
                f"{rows.start} to {rows.stop - 1} of matrix {matrix}: the folder is damaged. "
                "Download it again."
            )

    def pieces(self, elements: range, dtype: torch.dtype) -> Iterator[Piece]:
        """Yield what is needed for `elements` of the tensor in the model."""
        if not elements:
            return
        size = self.rows * self.columns
        step = max(1, ELEMENTS_AT_ONCE // self.columns)
        for matrix in range(elements.start // size, -(-elements.stop // size)):
            here = overlap(elements, range(matrix * size, (matrix + 1) * size))
            rows = range(self.rows)
            if not self.matrices.is_transposed:  # then elements are rows, else all rows have some
                first, last = here.start - matrix * size, here.stop - matrix * size
                rows = range(first // self.columns, -(-last // self.columns))
            for start in range(rows.start, rows.stop, step):
                some = range(start, min(start + step, rows.stop))
                yield Piece(tensor=self, matrix=matrix, rows=some, wanted=here, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Whole rows of one matrix of a quantized tensor."""

    tensor: Scaled
    matrix: int
    rows: range
    wanted: range
    """Elements of the tensor in the model, of which these rows hold some."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return len(self.tensor.values_bytes(self.matrix, self.rows))

    def runs(self, readers: Mapping[Path, DirectReader], buffer: Tensor) -> Iterator[PlacedValues]:
        """Yield the wanted elements. Raises WeightsMismatch if they are not finite."""
        tensor, matrices = self.tensor, self.tensor.matrices
        here = tensor.values_bytes(self.matrix, self.rows)
        values = readers[tensor.values.path].read(here.start, here.stop, buffer[:_VALUES_ROOM])
        here = tensor.scales_bytes(self.matrix, self.rows)
        data = readers[tensor.scales.path].read(here.start, here.stop, buffer[_VALUES_ROOM:])
        scales = typed(data, _SCALE_DTYPES[tensor.scales.entry.dtype])
        weights = (
            host_widener((matrices,))
            .rows(
                matrices,
                values.view(1, len(self.rows), -1),
                scales.view(1, -1, matrices.grid[1]),
                self.rows.start,
            )[0]
            .to(self.dtype)
        )
        tensor.require_finite(bool(torch.isfinite(weights).all()), self.matrix, self.rows)
        yield from self._columns(weights) if matrices.is_transposed else self._rows(weights)

    def _rows(self, weights: Tensor) -> Iterator[PlacedValues]:
        size = self.tensor.rows * self.tensor.columns
        first = self.matrix * size + self.rows.start * self.tensor.columns
        here = overlap(self.wanted, range(first, first + weights.numel()))
        yield PlacedValues(
            first=here.start, values=weights.view(-1)[here.start - first : here.stop - first]
        )

    def _columns(self, weights: Tensor) -> Iterator[PlacedValues]:
        """Yield the transpose: some columns of each row of the model, if the row is wanted."""
        width, offset = self.tensor.rows, self.matrix * self.tensor.rows * self.tensor.columns
        turned = weights.T  # (columns, rows)
        first, last = self.wanted.start - offset, self.wanted.stop - offset
        whole = range(-(-first // width), last // width)
        if whole:
            start = offset + whole.start * width + self.rows.start
            yield PlacedValues(first=start, values=turned[whole.start : whole.stop], stride=width)
        for row in {first // width, last // width} - set(whole):  # a rank may own a part of a row
            begin = row * width
            part = overlap(
                range(first, last), range(begin + self.rows.start, begin + self.rows.stop)
            )
            if part:
                some = slice(
                    part.start - begin - self.rows.start, part.stop - begin - self.rows.start
                )
                yield PlacedValues(first=offset + part.start, values=turned[row, some].contiguous())


def pair_scales(
    tensors: Mapping[str, StoredTensor], quantization: Quantization
) -> tuple[dict[str, StoredTensor], dict[str, Scaled]]:
    """Return the tensors by the names that the model has, and those of them that have scales.

    Raises WeightsMismatch.
    """
    left, scaled, faults = dict(tensors), {}, []
    for name in tensors:
        if name.endswith(_NOT_WEIGHTS[quantization.method]):
            del left[name]  # of inputs, which are not quantized here, or what the shape says
            continue
        own, values_name = _weight_of(name, tensors, quantization)
        if own is None:
            continue
        if own in scaled or values_name not in left or (own != values_name and own in left):
            faults.append(f"{name[:200]}: its weights are missing, or given twice")
            continue
        values, scales = left.pop(values_name), left.pop(name)
        try:
            scaled[own] = _MAKERS[quantization.method](values, scales, quantization)
        except ValueError as error:
            faults.append(f"{name[:200]}: {error}")
        left[own] = values
    if faults:
        raise WeightsMismatch(f"the scales do not suit the weights: {listing(faults, most=4)}")
    return left, scaled


def _weight_of(
    name: str, tensors: Mapping[str, StoredTensor], quantization: Quantization
) -> tuple[str | None, str]:
    """Return the weight whose scales `name` is, if any, and the tensor with its values."""
    if quantization.method == "mxfp4":
        own = name.removesuffix("_scales")
        return (own if own != name else None), f"{own}_blocks"
    if quantization.method == "int4":
        own = name.removesuffix("_scale")
        return (own if own != name else None), f"{own}_packed"
    for ending in _OTHER_SCALES:
        own = f"{name.removesuffix(ending)}.weight"
        if name.endswith(ending) and own in tensors:
            return own, own
    own = name.removesuffix("_scale_inv")
    return (own if own != name else None), own


def _scaled_fp8(values: StoredTensor, scales: StoredTensor, how: Quantization) -> Scaled:
    entry, grid = values.entry, scales.entry.shape
    _require(entry.dtype in _VALUE_DTYPES, f"{entry.name} is {entry.dtype}, not F8_E4M3")
    _require(len(entry.shape) >= 2, f"{entry.name} has shape {entry.shape}, not a matrix")
    *outer, rows, columns = entry.shape
    columns *= 2 if entry.dtype == "I8" else 1
    _check_scales(scales, rows, columns)
    matrices = math.prod(grid[:-2]) if len(grid) >= 2 else math.prod(grid)
    grid = grid[-2:] if len(grid) >= 2 else (1, 1)
    block = _block_of(rows, columns, grid, how.block)
    fits = block is not None and matrices in (1, math.prod(outer))
    _require(fits, f"shape {scales.entry.shape} does not divide {entry.name}, {entry.shape}")
    return Scaled(
        values=values, scales=scales, method="fp4" if entry.dtype == "I8" else "fp8",
        num_matrices=math.prod(outer), rows=rows, columns=columns, block=block or (1, 1),
    )  # fmt: skip


def _block_of(
    rows: int, columns: int, grid: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None if there are none."""
    if block is not None and grid == (-(-rows // block[0]), -(-columns // block[1])):
        return block
    if 0 in grid or rows % grid[0] or columns % grid[1]:
        return None
    return rows // grid[0], columns // grid[1]


def _scaled_mxfp4(values: StoredTensor, scales: StoredTensor, _: Quantization) -> Scaled:
    entry = values.entry
    _require(entry.dtype == "U8" and scales.entry.dtype == "U8", "blocks and scales must be U8")
    _require(
        len(entry.shape) == 4 and entry.shape[-1] == _GROUP_BYTES,
        f"{entry.name} has shape {entry.shape}; it must be experts, rows, groups, {_GROUP_BYTES}",
    )
    _require(
        scales.entry.shape == entry.shape[:-1],
        f"it has shape {scales.entry.shape}; {entry.name} has {entry.shape}",
    )
    experts, rows, groups = entry.shape[:3]
    _check_scales(scales, rows, groups * 2 * _GROUP_BYTES)
    return Scaled(
        values=values, scales=scales, method="mxfp4", num_matrices=experts, rows=rows,
        columns=groups * GROUP,
    )  # fmt: skip


def _scaled_int4(values: StoredTensor, scales: StoredTensor, how: Quantization) -> Scaled:
    entry = values.entry
    _require(entry.dtype == "I32", f"{entry.name} is {entry.dtype}, not I32")
    _require(len(entry.shape) == 2, f"{entry.name} has shape {entry.shape}, not a matrix")
    rows, columns = entry.shape[0], 8 * entry.shape[1]
    _check_scales(scales, rows, columns)
    assert how.block is not None
    group = how.block[1]
    _require(
        scales.entry.shape == (rows, -(-columns // group)),
        f"it has shape {scales.entry.shape}; {entry.name} has {rows} x {columns} values in groups "
        f"of {group}",
    )
    return Scaled(
        values=values, scales=scales, method="int4", num_matrices=1, rows=rows, columns=columns,
        block=how.block,
    )  # fmt: skip


_MAKERS = {"fp8": _scaled_fp8, "mxfp4": _scaled_mxfp4, "int4": _scaled_int4}


def _check_scales(scales: StoredTensor, rows: int, columns: int) -> None:
    known = scales.entry.dtype in _SCALE_DTYPES
    _require(known, f"it is {scales.entry.dtype}; scales are {', '.join(_SCALE_DTYPES)}")
    _require(rows > 0 and 0 < columns <= _LONGEST_ROW, f"a matrix of {rows} x {columns} is refused")


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements; a tensor may start at any byte of a file."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
