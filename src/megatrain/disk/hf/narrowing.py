"""Narrowing: weights of a folder rounded to nf4 while they are loaded.

As bitsandbytes on a CPU, with double scales (QLoRA): each 64 values are divided by their largest
magnitude and rounded to the nearest of 16 codes; the magnitudes, less their mean, are rounded to 8
bits in blocks of 256 in the same way.

A matrix comes in pieces and goes piece by piece. Only the magnitudes, one of 64 values, wait for
the matrix's end: their mean is part of the form.

Laws (tests/disk/hf/test_narrowing.py; against bitsandbytes: proofs/narrow)
    1. Bytes are those of bitsandbytes.
    2. Neither pieces nor threads change a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from megatrain.models.widening import dynamic_table, nf4_table
from megatrain.narrow import NF4_BLOCK, NF4_SCALES_BLOCK

AT_ONCE = 1 << 20
"""Elements that are rounded by one call."""
_LEAST = 1e-38
"""bitsandbytes divides by no less."""
_BINS = 1 << 16

Numbers = tuple[str, int, Tensor]
"""Numbers of an array of a matrix by the array's name, from a number on."""


def narrow_nf4(values: Iterator[Tensor]) -> Iterator[Numbers]:
    """Round one matrix, whose elements come in order, flat, in runs of any length."""
    found, first = [], 0
    for run in _regular(values, AT_ONCE):
        packed, largest = _coded(run.float())
        yield "values", first // 2, packed
        found.append(largest)
        first += run.numel()
    scales = torch.cat(found)
    offset = _mean(scales)
    codes, of_codes = _rounded_scales(scales - offset)
    yield "scales", 0, codes
    yield "scales_of_scales", 0, of_codes
    yield "offset", 0, offset.view(1)


def _regular(values: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """Yield the same elements in runs of `size`; the last may be shorter."""
    left: list[Tensor] = []
    have = 0
    for run in values:
        while have + len(run) >= size:
            taken, run = run[: size - have], run[size - have :]
            yield torch.cat([*left, taken]) if left else taken
            left, have = [], 0
        if len(run):
            left.append(run.clone())  # the buffer of a run is used again
            have += len(run)
    if left:
        yield torch.cat(left)


def _coded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return two codes to a byte, the first one in the upper bits, and the largest magnitudes."""
    whole = len(values) // NF4_BLOCK * NF4_BLOCK
    blocks = values[:whole].view(-1, NF4_BLOCK)
    largest = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / largest.clamp(min=_LEAST))[:, None]).view(-1)
    if whole < len(values):  # the last block of a matrix: bitsandbytes divides, and clamps
        rest = values[whole:]
        last = rest.abs().max().clamp(min=_LEAST)
        largest, scaled = torch.cat((largest, last.view(1))), torch.cat((scaled, rest / last))
    codes = nf4_table()
    bounds = (codes[:-1] + codes[1:]) / 2
    found = torch.bucketize(scaled.clamp_(-1, 1), bounds).to(torch.uint8)
    return (found[0::2] << 4) | found[1::2], largest


def _mean(numbers: Tensor) -> Tensor:
    """Return the mean of numbers as torch has it with one thread, whatever their number is."""
    return torch.stack((numbers, numbers)).mean(dim=1)[0]  # threads divide rows, never one row


def _rounded_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of numbers in blocks, and the largest magnitude of each block."""
    padded = torch.nn.functional.pad(scales, (0, -len(scales) % NF4_SCALES_BLOCK))
    blocks = padded.view(-1, NF4_SCALES_BLOCK)
    largest = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / largest)[:, None]).view(-1)[: len(scales)]
    bins = ((scaled + 1.0) * ((_BINS - 1) / 2) + 0.5).nan_to_num_().int().clamp_(0, _BINS - 1)
    return _code_of_bin()[bins], largest


@cache
def _code_of_bin() -> Tensor:
    """Return the code nearest to each of 65536 equidistant numbers from -1 to 1.

    The CPU kernel of bitsandbytes rounds to them first; the nearest code itself may be another.
    """
    codes = dynamic_table()
    numbers = -1.0 + 2.0 * torch.arange(_BINS, dtype=torch.float32) / (_BINS - 1)
    return torch.bucketize(numbers, (codes[:-1] + codes[1:]) / 2).to(torch.uint8)
