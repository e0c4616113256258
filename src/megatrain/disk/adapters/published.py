"""Merging into a quantized folder, back in its own form: what no adapter changes is copied.

    no adapter beside it     values and scales, byte for byte from the folder
    plain, with an adapter   the merged weight
    quantized, with one      the merged weight, rounded again: new values, new scales

The folder's names, blocks, groups and dtypes of scales stay, and so does its config.json, so that
whatever loads the folder loads the result. Rounding again loses what the form cannot hold:
`Rounding` says how much of the merged weights it changes, and how much the adapters do.

Laws (tests/disk/adapters/test_published.py)
    1. A tensor without an adapter has every byte of the folder's.
    2. A rounded tensor is the nearest in its form: fp8 as transformers rounds, mxfp4 to the nearest
       value under the largest exponent that holds its group.
    3. The printed error is that of the written weights against the merged ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.adapters.merge import merged
from megatrain.disk.hf.dequantize import Scaled
from megatrain.disk.hf.folder import read_folder
from megatrain.disk.hf.load import match_tensors
from megatrain.disk.hf.multimodal_tensors import (
    SourceFolder,
    source_tensor,
    source_values,
    wide_first,
)
from megatrain.disk.hf.narrowing import narrow_matrix
from megatrain.disk.hf.weights_file import NamedTensor, placed_tensors
from megatrain.errors import ConfigError
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.models.widening import widened
from megatrain.quantization import Quantization


@dataclass(slots=True)
class Rounding:
    """The error of rounding merged weights again; it adds up while they are written."""

    squares: float = 0.0
    """Sum of the squares of what rounding changes."""
    changes: float = 0.0
    """Squares of what the adapters add."""
    weights: float = 0.0
    """Squares of the merged weights."""
    num_params: int = 0

    def add(self, rounded: Tensor, wanted: Tensor, before: Tensor) -> None:
        """Count one tensor; `before` is its weight without the adapter."""
        wanted = wanted.double()
        self.squares += float((rounded.double() - wanted).square().sum())
        self.changes += float((before.double() - wanted).square().sum())
        self.weights += float(wanted.square().sum())
        self.num_params += wanted.numel()

    def __str__(self) -> str:
        if not self.num_params:
            return "no quantized tensor has an adapter, so nothing was rounded"
        error, added = ((one / self.weights) ** 0.5 for one in (self.squares, self.changes))
        return (
            f"{self.num_params:,} merged params were rounded again, with an error of {error:.2%} "
            f"of their norm; the adapters are {added:.2%} of it"
        )


def published_tensors(
    folder: Path, decoder: Decoder, store: Store, quantization: Quantization
) -> tuple[list[NamedTensor], Rounding]:
    """Return the tensors of a quantized folder with the adapters in them, and their error.

    The error is known once all of them were written. Raises what `match_tensors` does.
    """
    if quantization.method == "int4":
        raise ConfigError("--as-published: packed int4 is not written. Export without it, as bf16.")
    stored = read_folder(folder)
    source, rounding = SourceFolder(folder, stored), Rounding()
    matches, _ = match_tensors(folder, decoder, None, quantization)
    changed: dict[str, NamedTensor] = {}
    for match in matches:
        if match.tensor.param not in store.layout.places:
            continue
        ((tensor, plain),) = placed_tensors([match.tensor], decoder, store)
        ((_, whole),) = merged([(tensor, plain)], decoder, store)
        if whole is plain:
            continue
        if match.scaled is None:
            changed[match.stored.entry.name] = whole
            continue
        for one in _rounded(match.scaled, plain, whole, rounding):
            changed[one.name] = one
    tensors = (
        changed.get(name) or source_tensor(name, source, one)
        for name, one in sorted(stored.items(), key=wide_first)
    )
    return list(tensors), rounding


def _rounded(
    scaled: Scaled, plain: NamedTensor, whole: NamedTensor, rounding: Rounding
) -> Iterator[NamedTensor]:
    """Yield the values and the scales of a merged weight."""
    for array, stored in (("values", scaled.values), ("scales", scaled.scales)):
        yield RoundedTensor(
            name=stored.entry.name,
            shape=stored.entry.shape,
            values=source_values(stored.entry),
            array=array,
            scaled=scaled,
            plain=plain,
            whole=whole,
            rounding=rounding if array == "values" else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedTensor(NamedTensor):
    """The values or the scales of a merged weight; it is rounded while it is written."""

    array: str
    scaled: Scaled
    plain: NamedTensor
    whole: NamedTensor
    rounding: Rounding | None
    """Counts the error."""

    def pieces(self) -> Iterator[Tensor]:
        matrices = replace(self.scaled.matrices, count=1)
        size = matrices.matrix_elements
        before, after = _weight(self.plain), _weight(self.whole)
        for first in range(0, len(after), size):
            merged_matrix = after[first : first + size]
            given = merged_matrix
            if matrices.is_transposed:
                given = given.view(matrices.columns, matrices.rows).T.reshape(-1)
            data = torch.zeros(matrices.num_bytes, dtype=torch.uint8)
            for name, start, numbers in narrow_matrix(matrices, iter([given])):
                begin = matrices.arrays[name].start + start * numbers.element_size()
                data[begin : begin + numbers.nbytes] = numbers.view(torch.uint8)
            if self.rounding is not None:
                rounded = widened((matrices,), data, (size,), after.dtype)
                self.rounding.add(rounded, merged_matrix, before[first : first + size])
            here = matrices.arrays[self.array]
            yield data[here.start : here.stop].clone()


def _weight(tensor: NamedTensor) -> Tensor:
    return torch.cat([piece.view(tensor.dtype) for piece in tensor.pieces()])
