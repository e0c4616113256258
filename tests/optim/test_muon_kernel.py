"""Laws of Muon's two host passes: a momentum and its direction, and a step along a direction.

The oracle is numpy on fp32, whose operations round once each, and torch's own lerp, which has one
rounding less: they differ in the last bits alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.memory.kinds import kinds_of_matrices
from megatrain.memory.master import join, split_into
from megatrain.optim.kernel import CHUNK, DescentScalars, Kernel, MomentumScalars
from megatrain.optim.native import NativeKernel
from megatrain.optim.rounding import Rounding
from megatrain.optim.state_codes import decode_momentum, encode_momentum
from megatrain.optim.states import SHARED, STATES
from megatrain.optim.torch_kernel import LARGEST_GRAD

N = CHUNK + 40 * SHARED
BETA = 0.95


def states_of(state: str) -> list[Tensor]:
    return [
        torch.zeros(N // kind.elements_per_number, dtype=getattr(torch, str(kind.bf16)))
        for kind in kinds_of_matrices(STATES["muon"][state])
    ]


def gradients(dtype: torch.dtype, num_steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    scales = torch.tensor([0, 1e-40, 1e-20, 1e-3, 1, 1e10, 1e30, 3e38])[torch.arange(N) // 64 % 8]
    drawn = [torch.rand(N, generator=generator) * 2 - 1 for _ in range(num_steps)]
    return [(one * scales).to(dtype) for one in drawn]


def moved(kernel: Kernel, state: str, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    """Return the states and all directions of a few steps."""
    states, found = states_of(state), []
    for number, grad in enumerate(gradients(dtype), start=1):
        scalars = MomentumScalars.of(BETA, 0.37)
        rounding = Rounding(seed=5, update=number, first=7 * SHARED)
        kernel.momentum(states, grad, scalars, rounding, num_threads=threads)
        found.append(grad)
    return [*found, *states]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("state", STATES["muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_kernel_gives_the_bits_of_torch(
    kernels: list[Kernel], state: str, dtype: torch.dtype
) -> None:
    by_torch, *natives = kernels
    expected = moved(by_torch, state, dtype)
    for kernel in natives:
        for threads in (1, 2):
            assert same(moved(kernel, state, dtype, threads), expected), kernel.description
    assert all(bool(part.isfinite().all()) for part in expected if part.is_floating_point())


@pytest.mark.merge
def test_a_momentum_without_its_limit_is_noticed(
    compile_kernel: Callable[..., NativeKernel], kernels: list[Kernel]
) -> None:
    line = (
        "g = g > LARGEST_GRAD ? LARGEST_GRAD : g < -LARGEST_GRAD ? -LARGEST_GRAD : g;\n        m ="
    )
    broken = compile_kernel("-ffp-contract=off", replace=(line, "m ="))
    assert not same(moved(broken, "fp32", torch.float32), moved(kernels[0], "fp32", torch.float32))


def test_momentum_and_direction_have_the_bits_of_two_interpolations(
    kernels: list[Kernel],
) -> None:
    for kernel in kernels:
        (m,), by_lerp = states_of("fp32"), torch.zeros(N)
        for grad in gradients(torch.float32):
            g = grad.clamp(-LARGEST_GRAD, LARGEST_GRAD)
            by_lerp.lerp_(g, 1 - BETA)
            ahead = g.lerp(by_lerp, BETA)
            kernel.momentum([m], grad, MomentumScalars.of(BETA, 1.0), num_threads=1)
            normal = by_lerp.abs() >= 2.0**-126
            assert torch.equal(m[normal], by_lerp[normal]), kernel.description
            assert torch.equal(grad[normal], ahead[normal]), kernel.description
            by_lerp[~normal] = 0


def test_a_momentum_that_rounds_each_product_is_noticed() -> None:
    """Rounded once more, some last bits differ: the bits of torch are no accident."""
    (grad, *_), pull = gradients(torch.float32), float(np.float32(1 - BETA))
    m = torch.ones(N)
    assert not torch.equal((grad - m).mul(pull).add(m), m.lerp(grad, 1 - BETA))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_step_along_a_direction_is_that_of_a_separate_fp32_master(
    kernels: list[Kernel], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    master = torch.randn(N + 3, generator=generator)
    direction = torch.randn(N + 3, generator=generator).to(dtype)
    scalars = DescentScalars(decay=1 - 1e-4, step_size=3e-3)
    wanted = master.mul(1 - 1e-4).add_(direction, alpha=-3e-3).numpy()  # as torch.optim does
    for kernel in kernels:
        hi, lo = torch.empty(N + 3, dtype=torch.bfloat16), torch.empty(N + 3, dtype=torch.int16)
        split_into(master, hi, lo)
        kernel.descend(hi, lo, direction, scalars, num_threads=2)
        assert np.array_equal(join(hi, lo).numpy(), wanted), kernel.description
        if dtype is torch.float32:
            plain = master.clone()
            kernel.descend(plain, None, direction, scalars, num_threads=1)
            assert np.array_equal(plain.numpy(), wanted), kernel.description


@pytest.mark.parametrize("state", STATES["muon"])
def test_a_momentum_that_its_code_can_hold_stays(state: str) -> None:
    states, rounding = states_of(state), Rounding(seed=1, update=1, first=0)
    encode_momentum(torch.randn(N), states, rounding)
    held = decode_momentum(states).clone()
    again = states_of(state)
    encode_momentum(held, again, Rounding(seed=2, update=9, first=0))
    assert torch.equal(decode_momentum(again), held)
    assert float(held.abs().max()) > 1
