"""Narrow forms of frozen weights: values of a few bits and their scales, as arrays of bytes.

    fp8     E4M3 values; a scale for each block of rows and columns
    fp4     two E2M1 values to a byte; a scale for each block
    mxfp4   the same in groups of 32 with an exponent each; the model has every matrix transposed
    int4    two values of four bits to a byte, less 8; a scale for each group of a row
    nf4     two codes to a byte; a scale of 8 bits for each 64 values, and scales of these scales

A narrow param is a sequence of equal matrices, or of several such sequences. Its bytes are, for
each sequence, all values, then all scales:

    | values of matrix 0, 1, 2, ... | pad | scales of matrix 0, 1, 2, ... | pad |

so that any number of matrices is widened by one call. Without torch: a plan counts the same bytes
that a store allocates. models/widening.py has the arithmetic.

Laws (tests/test_narrow.py)
    1. Arrays never overlap, and each starts on GRAIN bytes.
    2. Bytes per element are at most 1.05 for fp8, and 0.6 for the forms of four bits, for the
       matrices of known models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Method = Literal["fp8", "fp4", "mxfp4", "int4", "nf4"]
ScaleDtype = Literal["float32", "bfloat16", "float16", "uint8", "float8_e8m0fnu"]
GRAIN = 16
"""Bytes: every dtype of scales is aligned, and so are loads of a device."""
NF4_BLOCK = 64
NF4_SCALES_BLOCK = 256
"""Values that share a scale, and scales that share one: bitsandbytes' defaults."""
_SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "float8_e8m0fnu": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """Numbers of one kind for each of several matrices, one matrix behind the other."""

    name: str
    dtype: str
    """The name that torch has for it."""
    size: int
    """Numbers of one matrix."""
    start: int
    """First byte, from the first of the sequence."""
    count: int
    """Matrices."""

    @property
    def matrix_bytes(self) -> int:
        return self.size * _SCALE_BYTES[self.dtype]

    @property
    def stop(self) -> int:
        return self.start + self.count * self.matrix_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Equal matrices in one narrow form."""

    method: Method
    count: int
    rows: int
    columns: int
    block: tuple[int, int] = (1, 1)
    """Rows and columns that share a scale; nf4 counts in elements instead."""
    scale: ScaleDtype = "float32"

    @property
    def matrix_elements(self) -> int:
        return self.rows * self.columns

    @property
    def num_elements(self) -> int:
        return self.count * self.matrix_elements

    @property
    def is_transposed(self) -> bool:
        """Whether the model has each matrix the other way round."""
        return self.method == "mxfp4"

    @property
    def is_packed(self) -> bool:
        """Whether two values share a byte."""
        return self.method != "fp8"

    @property
    def row_bytes(self) -> int:
        return self.columns // 2 if self.is_packed else self.columns

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scales of one matrix."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def arrays(self) -> dict[str, Array]:
        """The numbers of all matrices, by name: `values` first."""
        if self.method == "nf4":
            scales = -(-self.matrix_elements // NF4_BLOCK)
            kinds = [
                ("values", "uint8", -(-self.matrix_elements // 2)),
                ("scales", "uint8", scales),
                ("scales_of_scales", "float32", -(-scales // NF4_SCALES_BLOCK)),
                ("offset", "float32", 1),
            ]
        else:
            kinds = [
                ("values", "uint8", self.rows * self.row_bytes),
                ("scales", self.scale, math.prod(self.grid)),
            ]
        found, start = {}, 0
        for name, dtype, size in kinds:
            found[name] = Array(name=name, dtype=dtype, size=size, start=start, count=self.count)
            start = -(-found[name].stop // GRAIN) * GRAIN
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, padded."""
        last = list(self.arrays.values())[-1]
        return -(-last.stop // GRAIN) * GRAIN


Form = tuple[Matrices, ...]
"""The narrow form of a param: its matrices, in the order of its elements."""


def joined(parts: Iterable[Matrices]) -> Form:
    """Return matrices in order, equal neighbors as one sequence."""
    found: list[Matrices] = []
    for part in parts:
        if found and replace(found[-1], count=part.count) == part:
            part = replace(part, count=found.pop().count + part.count)
        found.append(part)
    return tuple(found)


def form_bytes(form: Form) -> int:
    """Return the bytes of a narrow param."""
    return sum(matrices.num_bytes for matrices in form)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Neighboring matrices of a form."""

    matrices: Matrices
    start: int
    """First byte of their sequence, from the first of the param."""
    first: int
    """The first matrix, counted in its sequence."""

    def array_bytes(self, name: str, count: int = 1) -> range:
        """Return the bytes that `count` matrices from the first on have in an array."""
        array = self.matrices.arrays[name]
        begin = self.start + array.start + self.first * array.matrix_bytes
        return range(begin, begin + count * array.matrix_bytes)


def find_matrix(form: Form, element: int) -> Spot:
    """Return the matrix whose first element is `element` of the param."""
    start = elements = 0
    for matrices in form:
        if element < elements + matrices.num_elements:
            first, rest = divmod(element - elements, matrices.matrix_elements)
            assert rest == 0, f"element {element} is inside a matrix"
            return Spot(matrices=matrices, start=start, first=first)
        start += matrices.num_bytes
        elements += matrices.num_elements
    raise LookupError(f"element {element} is behind the last of {elements}")


def published(
    shape: tuple[int, ...], method: str, block: tuple[int, int] | None
) -> Matrices | None:
    """Return the form that a weight has in a quantized folder; None if it has none there.

    `shape` is that of the model; `block` is what the folder says of its scales.
    """
    *outer, rows, columns = shape
    count = math.prod(outer)
    if method == "mxfp4":  # experts alone, transposed
        turned = Matrices(
            method="mxfp4", count=count, rows=columns, columns=rows, block=(1, 32), scale="uint8"
        )
        return turned if outer else None
    if method == "int4":
        return Matrices(
            method="int4", count=count, rows=rows, columns=columns, block=block or (1, 32),
            scale="bfloat16",
        )  # fmt: skip
    block = block or (rows, columns)
    return Matrices(method="fp8", count=count, rows=rows, columns=columns, block=block)


def nf4_on_load(shape: tuple[int, ...]) -> Matrices:
    """Return the form of a weight that is rounded to nf4 while it is loaded."""
    *outer, rows, columns = shape
    return Matrices(method="nf4", count=math.prod(outer), rows=rows, columns=columns)
