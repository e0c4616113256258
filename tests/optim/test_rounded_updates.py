"""Laws of updates whose moments are kept in bf16 or in 8 bits.

One result, whoever computes it and however a run is cut, and it is AdamW's but for the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatrain.memory.master import join, split_into
from megatrain.optim.kernel import CHUNK, AdamWScalars, Kernel
from megatrain.optim.native import NativeKernel
from megatrain.optim.rounding import Rounding
from megatrain.optim.state_codes import decode
from megatrain.optim.states import SHARED, STATES
from megatrain.optim.torch_kernel import TorchKernel
from tests.optim.test_kernel import BF16_MAX, gradients, masters, scalars_at

CODES = ("bf16", "8bit")
SEED, FIRST = 17, 5 * SHARED


@dataclass(slots=True, kw_only=True)
class Run:
    """A run of elements with its states; `lo` is None for an fp32 weight."""

    weight: Tensor
    lo: Tensor | None
    states: Sequence[Tensor]

    @classmethod
    def of(cls, master: Tensor, code: str, *, split: bool = True) -> Run:
        kinds = STATES["adamw"][code]
        states = [
            torch.zeros(
                master.numel() // kind.elements_per_number, dtype=getattr(torch, str(kind.bf16))
            )
            for kind in kinds
        ]
        if not split:
            return cls(weight=master.clone(), lo=None, states=states)
        hi, lo = torch.empty_like(master).bfloat16(), torch.empty_like(master).short()
        split_into(master, hi, lo)
        return cls(weight=hi, lo=lo, states=states)

    def update(
        self,
        kernel: Kernel,
        grad: Tensor,
        number: int,
        *,
        scalars: AdamWScalars | None = None,
        first: int = FIRST,
        num_threads: int = 1,
    ) -> None:
        rounding = Rounding(seed=SEED, update=number, first=first)
        scalars = scalars or scalars_at(number, grad_scale=0.37)
        kernel.adamw(
            *(self.weight, self.lo, self.states, grad, scalars, rounding), num_threads=num_threads
        )

    def part(self, begin: int, end: int) -> Run:
        shared = [self.weight.numel() // state.numel() for state in self.states]
        return Run(
            weight=self.weight[begin:end],
            lo=None if self.lo is None else self.lo[begin:end],
            states=[s[begin // e : end // e] for s, e in zip(self.states, shared, strict=True)],
        )

    def master(self) -> Tensor:
        return self.weight if self.lo is None else join(self.weight, self.lo)

    def bits(self) -> list[Tensor]:
        return [part.view(torch.uint8) for part in (self.master(), *self.states)]


def same(left: Run, right: Run) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.bits(), right.bits(), strict=True))


@pytest.mark.parametrize("n", [SHARED, 3 * SHARED, CHUNK + 7 * SHARED])
@pytest.mark.parametrize("split", [True, False], ids=["split", "fp32"])
@pytest.mark.parametrize("code", CODES)
def test_every_kernel_gives_the_bits_of_torch(
    natives: list[Kernel], code: str, split: bool, n: int
) -> None:
    oracle = Run.of(masters(n), code, split=split)
    runs = [(kernel, Run.of(masters(n), code, split=split)) for kernel in natives]
    for number, grad in enumerate(gradients(n, 6), start=1):
        grad = grad if split and number % 2 else grad.float()
        oracle.update(TorchKernel(), grad, number)
        for kernel, run in runs:
            run.update(kernel, grad, number, num_threads=1 + number % 3)
            assert same(run, oracle), kernel.description


@pytest.mark.merge
def test_other_random_bits_would_be_noticed(compile_kernel: Callable[..., NativeKernel]) -> None:
    broken = compile_kernel("-ffp-contract=off", replace=("* 0x846ca68bu", "* 0x846ca68du"))
    n = 8 * SHARED
    for code in CODES:
        oracle, run = Run.of(masters(n), code), Run.of(masters(n), code)
        for number, grad in enumerate(gradients(n, 2), start=1):
            oracle.update(TorchKernel(), grad, number)
            run.update(broken, grad, number)
        assert not same(run, oracle)


@pytest.mark.parametrize("code", CODES)
def test_a_run_in_parts_is_the_run_as_a_whole(kernels: list[Kernel], code: str) -> None:
    n, cuts = 20 * SHARED, (0, SHARED, 4 * SHARED, 19 * SHARED, 20 * SHARED)
    for kernel in kernels:
        whole, parted = Run.of(masters(n), code), Run.of(masters(n), code)
        forgetful = Run.of(masters(n), code)
        for number, grad in enumerate(gradients(n, 4), start=1):
            whole.update(kernel, grad, number)
            for begin, end in pairwise(cuts):
                part = grad[begin:end]
                parted.part(begin, end).update(kernel, part, number, first=FIRST + begin)
                forgetful.part(begin, end).update(kernel, part, number)
        assert same(parted, whole), kernel.description
        assert not same(forgetful, whole), "a part that forgets where it begins would be noticed"


def largest_codes(kernel: Kernel) -> tuple[Tensor, Tensor]:
    """The largest codes of m and of v in each block and after each update, with beta2 = 0.999."""
    n = 4 * SHARED
    run, m, v = Run.of(masters(n), "8bit"), [], []
    for number, grad in enumerate(gradients(n, 20), start=1):
        run.update(kernel, grad, number, scalars=scalars_at(number, betas=(0.9, 0.999)))
        m.append((run.states[0] & 0x7F).view(-1, SHARED).amax(1))
        v.append(run.states[2].view(-1, SHARED).amax(1))
    return torch.stack(m), torch.stack(v)


def test_the_largest_moments_of_a_block_have_the_largest_codes(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        m, v = largest_codes(kernel)
        assert (m == 127).all(), kernel.description
        assert (v == 255).all(), kernel.description


def distance_gone(kernel: Kernel, code: str, num_steps: int) -> tuple[Tensor, Tensor]:
    """How far weights went, with moments in `code` and with torch.optim.AdamW in fp32."""
    n, lr = 64 * SHARED, 3e-4
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(n, generator=generator) * 0.02
    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([theirs], lr=lr, betas=(0.9, 0.99), weight_decay=0.1)
    run = Run.of(master, code, split=False)
    drift = torch.randn(n, generator=generator) * 3e-4
    for number in range(1, num_steps + 1):
        grad = torch.randn(n, generator=generator) * 1e-3 + drift
        theirs.grad = grad.clone()
        optimizer.step()
        run.update(kernel, grad, number, scalars=scalars_at(number, lr=lr, betas=(0.9, 0.99)))
    return run.weight - master, theirs.detach() - master


@pytest.mark.parametrize("code", CODES)
def test_the_first_update_is_adamws(kernels: list[Kernel], code: str) -> None:
    """Weights move by moments that are not rounded yet."""
    for kernel in kernels:
        ours, theirs = distance_gone(kernel, code, 1)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("code", CODES)
def test_weights_go_where_adamws_go(natives: list[Kernel], code: str) -> None:
    ours, theirs = distance_gone(natives[-1], code, 100)
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1, abs=0.01)
    assert float((ours - theirs).norm() / theirs.norm()) < {"bf16": 0.03, "8bit": 0.1}[code]


@pytest.mark.parametrize("code", CODES)
def test_finite_gradients_leave_everything_finite(kernels: list[Kernel], code: str) -> None:
    for kernel in kernels:
        run = Run.of(torch.ones(2 * SHARED), code)
        for number in range(1, 21):
            grad = torch.full((2 * SHARED,), BF16_MAX if number % 2 else -BF16_MAX)
            grad[::3] = 1e-30
            run.update(kernel, grad.bfloat16() if number % 3 else grad, number)
        for part in (run.master(), *decode(run.states)):
            assert part.isfinite().all(), kernel.description


@pytest.mark.parametrize("code", CODES)
def test_padding_stays_zero(kernels: list[Kernel], code: str) -> None:
    for kernel in kernels:
        master = torch.randn(2 * SHARED)
        master[SHARED + 100 :] = 0
        run = Run.of(master, code)
        for number, grad in enumerate(gradients(2 * SHARED, 20), start=1):
            grad[SHARED + 100 :] = 0
            run.update(kernel, grad, number)
        padding = [run.weight, run.states[0], run.states[2 if code == "8bit" else 1]]
        assert run.weight[:SHARED].any()
        for part in padding:
            assert not part[SHARED + 100 :].any(), kernel.description


@pytest.mark.parametrize("code", CODES)
def test_idle_moments_come_to_rest_at_zero(natives: list[Kernel], code: str) -> None:
    run = Run.of(torch.ones(SHARED), code)
    run.update(natives[-1], torch.full((SHARED,), 1e-17), 1, scalars=scalars_at(1))
    assert decode(run.states)[1].all()
    for number in range(2, 6000):
        run.update(natives[-1], torch.zeros(SHARED), number, scalars=scalars_at(1))
    for moment in decode(run.states):
        assert not moment.any()


@pytest.mark.parametrize("code", CODES)
def test_what_an_update_needs_is_asked_for(code: str) -> None:
    run, grad = Run.of(torch.zeros(2 * SHARED), code), torch.zeros(2 * SHARED)
    with pytest.raises(AssertionError):  # no rounding
        TorchKernel().adamw(run.weight, run.lo, run.states, grad, scalars_at(1), num_threads=1)
    with pytest.raises(AssertionError):  # half a block
        run.part(0, SHARED // 2).update(TorchKernel(), grad[: SHARED // 2], 1)
    with pytest.raises(AssertionError):  # a state of another dtype
        replace(run, states=[run.states[0].double(), *run.states[1:]]).update(
            TorchKernel(), grad, 1
        )
