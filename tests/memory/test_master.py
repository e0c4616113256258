"""The split master is the fp32 value, for every finite bit pattern."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.memory.master import join, split_into


def _values(first: int, count: int, step: int = 1) -> Tensor:
    """Return the fp32 values of `count` bit patterns, infinities and NaN left out."""
    bits = torch.arange(first, first + count * step, step, dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    return values[values.isfinite()]


def _split(master: Tensor) -> tuple[Tensor, Tensor]:
    hi = torch.empty(master.shape, dtype=torch.bfloat16)
    lo = torch.empty(master.shape, dtype=torch.int16)
    split_into(master, hi, lo)
    return hi, lo


def _is_exact(master: Tensor) -> bool:
    return torch.equal(join(*_split(master)).view(torch.int32), master.view(torch.int32))


@pytest.mark.parametrize("first", [-(2**31), -(2**31) + 1, 0, 1, 0x3F800000, 0x7F700000])
def test_exact_around_the_corners(first: int) -> None:
    assert _is_exact(_values(first, 1 << 17))


def test_exact_on_a_dense_sample() -> None:
    # A step that is odd meets every low half with every exponent.
    assert _is_exact(_values(-(2**31), 1 << 22, step=1021))


@pytest.mark.long
def test_exact_for_every_finite_pattern() -> None:
    count = 1 << 20  # small enough to stay in the cache
    for first in range(-(2**31), 2**31, count):
        assert _is_exact(_values(first, count)), f"first pattern {first:#x}"


def test_bf16_splits_into_itself_and_zero() -> None:
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    weights = weights[weights.isfinite()]
    hi, lo = _split(weights.float())
    assert torch.equal(hi.view(torch.int16), weights.view(torch.int16))
    assert not lo.any()


def test_hi_is_the_nearest_bf16() -> None:
    master = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    hi, _ = _split(master)
    nearest = master.to(torch.bfloat16)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(hi[~tie], nearest[~tie])
