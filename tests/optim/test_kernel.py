"""Laws of the AdamW update: one result, whoever computes it, and it is AdamW's.

The oracle is a separate fp32 master updated by numpy, whose operations round once each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.memory.master import join, split_into
from megatrain.optim.kernel import CHUNK, AdamWScalars, Kernel
from megatrain.optim.native import NativeKernel
from megatrain.optim.torch_kernel import TorchKernel

BF16_MAX = torch.finfo(torch.bfloat16).max
FP32_TINY = torch.finfo(torch.float32).tiny

# zeros, denormals, and far beyond what training meets; squares of the last overflow
WEIGHT_SCALES = torch.tensor([0, 1e-40, 1e-20, 1e-8, 0.02, 1, 1e10, 1e30])
GRAD_SCALES = torch.tensor([0, 1e-40, 1e-20, 1e-8, 1e-3, 1, 1e10, 1e30])


def scalars_at(step: int, **changes: Any) -> AdamWScalars:
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return AdamWScalars.at(step, **(settings | changes))


@dataclass(slots=True, kw_only=True)
class State:
    """Weight and moments; `lo` is None for a plain fp32 weight."""

    weight: Tensor
    lo: Tensor | None
    m: Tensor
    v: Tensor

    @classmethod
    def of(cls, master: Tensor, *, split: bool) -> State:
        m, v = torch.zeros_like(master), torch.zeros_like(master)
        if not split:
            return cls(weight=master.clone(), lo=None, m=m, v=v)
        hi, lo = torch.empty_like(master).bfloat16(), torch.empty_like(master).short()
        split_into(master, hi, lo)
        return cls(weight=hi, lo=lo, m=m, v=v)

    def update(self, kernel: Kernel, grad: Tensor, s: AdamWScalars, num_threads: int = 1) -> None:
        states = (self.m, self.v)
        kernel.adamw(self.weight, self.lo, states, grad, s, num_threads=num_threads)

    def bits(self) -> list[Tensor]:
        """Bits of master, m and v."""
        master = self.weight
        if self.lo is not None:
            master = join(self.weight, self.lo)
        return [part.view(torch.int32) for part in (master, self.m, self.v)]


def numpy_update(state: State, grad: Tensor, s: AdamWScalars) -> None:
    """The formula once more, for a separate fp32 master."""
    f = np.float32
    p, m, v = state.weight.numpy(), state.m.numpy(), state.v.numpy()
    with np.errstate(over="ignore", under="ignore"):
        g = grad.float().numpy() * f(s.grad_scale)
        m += g * f(s.one_minus_beta1) - m * f(s.one_minus_beta1)
        m[np.abs(m) < f(FP32_TINY)] = 0
        v[:] = v * f(s.beta2) + (g * f(s.one_minus_beta2)) * g
        v[v < f(FP32_TINY)] = 0
        denom = np.sqrt(v) * f(s.denom_scale) + f(s.eps)
        p[:] = p * f(s.decay) - (m / denom) * f(s.step_size)


def masters(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    scale = WEIGHT_SCALES[torch.arange(n) // 8 % 8]
    return torch.randn(n, generator=generator) * scale


def gradients(n: int, num_steps: int) -> Iterator[Tensor]:
    """Every scale meets every weight scale; half the elements change scale at each step."""
    generator = torch.Generator().manual_seed(2)
    index = torch.arange(n)
    for step in range(num_steps):
        scale = GRAD_SCALES[(index + step * (index // 64 % 2)) % 8]
        yield torch.randn(n, generator=generator).mul_(scale).bfloat16()


def same(left: State, right: State) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.bits(), right.bits(), strict=True))


def run_all(kernels: list[Kernel], n: int, num_steps: int) -> None:
    oracle = State.of(masters(n), split=False)
    split_bf16 = [State.of(masters(n), split=True) for _ in kernels]
    split_fp32 = [State.of(masters(n), split=True) for _ in kernels]
    plain = [State.of(masters(n), split=False) for _ in kernels]
    for step, grad in enumerate(gradients(n, num_steps), start=1):
        s = scalars_at(step, lr=1e-3 / step, grad_scale=0.37)
        numpy_update(oracle, grad, s)
        for i, kernel in enumerate(kernels):
            split_bf16[i].update(kernel, grad, s, num_threads=1 + step % 2)
            split_fp32[i].update(kernel, grad.float(), s)
            plain[i].update(kernel, grad.float(), s)
    for i, kernel in enumerate(kernels):
        assert same(split_bf16[i], oracle), kernel.description
        assert same(split_fp32[i], oracle), kernel.description
        assert same(plain[i], oracle), kernel.description


def test_every_kernel_gives_the_bits_of_a_separate_fp32_master(kernels: list[Kernel]) -> None:
    run_all(kernels, n=200_003, num_steps=20)


@pytest.mark.long
def test_every_kernel_gives_the_bits_of_a_separate_fp32_master_long(
    kernels: list[Kernel],
) -> None:
    run_all(kernels, n=10_000_019, num_steps=100)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
def test_short_runs(kernels: list[Kernel], n: int) -> None:
    run_all(kernels, n=n, num_steps=3)


def test_the_number_of_threads_changes_nothing(natives: list[Kernel]) -> None:
    n = 5 * CHUNK + 100
    (grad,) = gradients(n, 1)
    oracle = State.of(masters(n), split=False)
    numpy_update(oracle, grad, scalars_at(1))
    for kernel in natives:
        for num_threads in (1, 2, 3, 7):
            state = State.of(masters(n), split=True)
            state.update(kernel, grad, scalars_at(1), num_threads=num_threads)
            assert same(state, oracle), (kernel.description, num_threads)


@pytest.mark.merge
def test_a_fused_multiply_add_would_be_noticed(
    compile_kernel: Callable[..., NativeKernel],
) -> None:
    """Broken: the compiler may contract products and sums."""
    if "avx2" not in NativeKernel().instruction_sets:
        pytest.skip("needs x86 with FMA")
    n = 10_000
    contracted = compile_kernel("-ffp-contract=fast", "-mfma")
    oracle, state = State.of(masters(n), split=False), State.of(masters(n), split=True)
    for step, grad in enumerate(gradients(n, 3), start=1):
        numpy_update(oracle, grad, scalars_at(step))
        state.update(contracted, grad, scalars_at(step))
    assert not same(state, oracle)


def test_flushed_denormals_of_the_process_do_not_reach_native(natives: list[Kernel]) -> None:
    n = 100_000
    master, grad = torch.full((n,), 1e-40), torch.zeros(n)
    oracle = State.of(master, split=False)
    numpy_update(oracle, grad, scalars_at(1))
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        for num_threads in (1, 5):  # 5: threads born here inherit the flushing state
            for kernel in natives:
                state = State.of(master, split=False)
                state.update(kernel, grad, scalars_at(1), num_threads=num_threads)
                assert same(state, oracle), kernel.description
        # the process still flushes: its setting was put back, and the test has power
        assert (master * 0.9999).max() == 0
    finally:
        torch.set_flush_denormal(False)


def difference_from_torch(kernel: Kernel, scalars: Callable[..., AdamWScalars]) -> float:
    """Relative difference of the weights from torch.optim.AdamW in fp32 after 100 steps."""
    n, lr = 50_000, 3e-4
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(n, generator=generator) * 0.02
    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([theirs], lr=lr, weight_decay=0.1)
    ours = State.of(master, split=False)
    for step in range(1, 101):
        grad = torch.randn(n, generator=generator) * 1e-3
        theirs.grad = grad.clone()
        optimizer.step()
        ours.update(kernel, grad, scalars(step, lr=lr))
    moved = (theirs - master).norm() / master.norm()
    assert moved > 0.1
    return float((ours.weight - theirs.detach()).norm() / theirs.detach().norm())


def test_agrees_with_torch_adamw(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert difference_from_torch(kernel, scalars_at) <= 1e-6, kernel.description


def test_disagreement_with_torch_adamw_would_be_noticed() -> None:
    """Broken: bias correction counted from 0, decay forgotten, 1 - beta2 taken in fp32."""

    def late(step: int, **changes: Any) -> AdamWScalars:
        return scalars_at(step + 1, **changes)

    def undecayed(step: int, **changes: Any) -> AdamWScalars:
        return scalars_at(step, weight_decay=0.0, **changes)

    def rounded(step: int, **changes: Any) -> AdamWScalars:
        complement = float(np.float32(1) - np.float32(0.999))
        return dataclasses.replace(scalars_at(step, **changes), one_minus_beta2=complement)

    for broken in (late, undecayed, rounded):
        assert difference_from_torch(TorchKernel(), broken) > 1e-6, broken.__name__


def test_finite_gradients_leave_weights_finite(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        state = State.of(torch.ones(64), split=True)
        for step in range(1, 21):
            grad = torch.full((64,), BF16_MAX if step % 2 else -BF16_MAX).bfloat16()
            state.update(kernel, grad, scalars_at(step))
        assert state.weight.isfinite().all(), kernel.description
        assert state.m.isfinite().all(), kernel.description


@pytest.mark.merge
def test_idle_moments_come_to_rest_at_zero(
    kernels: list[Kernel], compile_kernel: Callable[..., NativeKernel]
) -> None:
    def after_a_long_rest(kernel: Kernel) -> State:
        state = State.of(torch.ones(64), split=True)
        state.m.fill_(1e-36)
        state.v.fill_(2e-38)
        for _ in range(1000):
            state.update(kernel, torch.zeros(64).bfloat16(), scalars_at(1000))
        return state

    for kernel in kernels:
        state = after_a_long_rest(kernel)
        assert state.m.count_nonzero() == 0, kernel.description
        assert state.v.count_nonzero() == 0, kernel.description

    # broken: without the rule, rounding holds them at a denormal for ever
    restless = compile_kernel(
        "-ffp-contract=off",
        replace=("return as_bits(x) & 0x7f800000u ? x : 0.0f;", "return x;"),
    )
    assert 0 < after_a_long_rest(restless).m.max() < FP32_TINY


def test_scalars_are_rounded_once_from_double() -> None:
    s = AdamWScalars.at(3, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, grad_scale=0.5)
    assert s.one_minus_beta1 == float(np.float32(1 - 0.9))
    assert s.one_minus_beta2 == float(np.float32(1 - 0.999))
    assert s.decay == float(np.float32(1 - 1e-3 * 0.1))
    assert s.denom_scale == float(np.float32(1 / math.sqrt(1 - 0.999**3)))
    assert s.step_size == float(np.float32(1e-3 / (1 - 0.9**3)))
    # in fp32 the complement would be off by 5e-5
    assert s.one_minus_beta2 != float(np.float32(1) - np.float32(0.999))


@pytest.mark.parametrize("broken", ["lo", "m", "v", "grad"])
def test_refuses_tensors_that_do_not_match(broken: str) -> None:
    good = {
        "weight": torch.zeros(8).bfloat16(),
        "lo": torch.zeros(8).short(),
        "m": torch.zeros(8),
        "v": torch.zeros(8),
        "grad": torch.zeros(8).bfloat16(),
    }
    for wrong in (good[broken][:4], good[broken].double(), good[broken].repeat(2)[::2]):
        tensors = good | {broken: wrong}
        state = State(**{name: tensors[name] for name in ("weight", "lo", "m", "v")})
        with pytest.raises(AssertionError):
            state.update(TorchKernel(), tensors["grad"], scalars_at(1))


def test_an_update_of_nothing_changes_no_bit_of_any_master(kernels: list[Kernel]) -> None:
    # An odd step meets every low half with every exponent.
    bits = torch.arange(-(2**31), 2**31 - 1, 5_119, dtype=torch.int64).int()
    master = bits.view(torch.float32)
    master = master[master.isfinite()]
    for kernel in kernels:
        state = State.of(master, split=True)
        before = [part.clone() for part in state.bits()]
        state.update(kernel, torch.zeros_like(master), scalars_at(1, lr=0.0))
        assert all(torch.equal(a, b) for a, b in zip(before, state.bits(), strict=True))
