"""Laws of the squared norm: one result, whoever computes it; finite when the gradient is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatrain.optim.kernel import CHUNK, Kernel

SIZES = [0, 1, 1023, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 777]
DTYPES = [torch.bfloat16, torch.float32]


def gradient(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_kernel_gives_the_same_bits(
    kernels: list[Kernel], n: int, dtype: torch.dtype
) -> None:
    grad = gradient(n, dtype)
    sums = {
        kernel.squared_norm(grad, num_threads=num_threads)
        for kernel in kernels
        for num_threads in (1, 2)
    }
    assert len(sums) == 1
    exact = math.fsum(x * x for x in grad.double().tolist())
    assert sums.pop() == pytest.approx(exact, rel=1e-14)


def test_another_order_would_be_noticed(kernels: list[Kernel]) -> None:
    """Broken: the same squares in reverse."""
    grad = gradient(3 * CHUNK + 777, torch.float32)
    for kernel in kernels:
        forward = kernel.squared_norm(grad, num_threads=1)
        assert forward != kernel.squared_norm(grad.flip(0), num_threads=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_anywhere_makes_it_not_finite(
    kernels: list[Kernel], bad: float, dtype: torch.dtype
) -> None:
    n = CHUNK + 1500
    for position in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1024, n - 1):
        grad = torch.zeros(n, dtype=dtype)
        grad[position] = bad
        for kernel in kernels:
            assert not math.isfinite(kernel.squared_norm(grad, num_threads=2)), position


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_finite_elements_are_finite(
    kernels: list[Kernel], dtype: torch.dtype
) -> None:
    largest = torch.full((CHUNK + 5,), torch.finfo(dtype).max, dtype=dtype)
    smallest = torch.full((CHUNK + 5,), torch.finfo(dtype).smallest_normal * 2**-7, dtype=dtype)
    for kernel in kernels:
        assert math.isfinite(kernel.squared_norm(largest, num_threads=2))
        exact = (CHUNK + 5) * float(smallest[0]) ** 2
        assert kernel.squared_norm(smallest, num_threads=2) == pytest.approx(exact, abs=0)
    # a sum in fp32 would call these gradients infinite and zero
    assert not largest.float().square().sum().isfinite()
    assert smallest.float().square().sum() == 0
