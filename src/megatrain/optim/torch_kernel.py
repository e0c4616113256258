"""The kernel by torch: the bits of kernel.c from operations that round once each.

Torch's fused operations (lerp, addcmul, addcdiv) round differently from build to build, so each
product, sum, quotient and root is its own operation. The work goes block by block, so that
intermediate results stay in the cache.

`num_threads` is ignored: torch shares the work among its own threads. Denormals are kept unless
the process asked torch to flush them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatrain.memory.master import join, split_into
from megatrain.optim.kernel import (
    CHUNK,
    AdamWScalars,
    DescentScalars,
    FoldedScalars,
    Kernel,
    MomentumScalars,
)
from megatrain.optim.rounding import Rounding
from megatrain.optim.state_codes import decode, decode_momentum, encode, encode_momentum

BLOCK = 131072
"""Elements per block: with its five temporaries about 4 MiB, within the cache of two cores."""

ROW = 1024
"""Elements per row of a chunk, as in kernel.c: rows are added up, then the row is folded."""

LARGEST_GRAD = 2.0**63
"""Largest gradient where moments are rounded: the square of a larger one would not fit v. Also that
of a momentum, so that differences are finite."""

LARGEST_DENORMAL = (1 - 2.0**-23) * 2.0**-126


class TorchKernel(Kernel):
    def __init__(self, why: str = "asked for") -> None:
        self.description = f"torch ({why})"

    def _adamw(
        self,
        weight: Tensor,
        lo: Tensor | None,
        states: Sequence[Tensor],
        grad: Tensor,
        scalars: AdamWScalars,
        rounding: Rounding,
        num_threads: int,
    ) -> None:
        for begin in range(0, grad.numel(), BLOCK):
            block = slice(begin, begin + BLOCK)
            if states[0].dtype == torch.float32:
                change = _change(states[0][block], states[1][block], grad[block], scalars)
            else:
                part = [_part(state, grad.numel(), block) for state in states]
                later = replace(rounding, first=rounding.first + begin)
                change = _rounded_change(part, grad[block], FoldedScalars.of(scalars), later)
            if lo is None:
                weight[block].mul_(scalars.decay).sub_(change)
            else:
                master = join(weight[block], lo[block])
                split_into(master.mul_(scalars.decay).sub_(change), weight[block], lo[block])

    def _momentum(
        self,
        states: Sequence[Tensor],
        grad: Tensor,
        scalars: MomentumScalars,
        rounding: Rounding,
        num_threads: int,
    ) -> None:
        for begin in range(0, grad.numel(), BLOCK):
            block = slice(begin, begin + BLOCK)
            part = [_part(state, grad.numel(), block) for state in states]
            g = grad[block].float().mul(scalars.grad_scale).clamp_(-LARGEST_GRAD, LARGEST_GRAD)
            m = decode_momentum(part)
            m = _added(m, g - m, scalars.pull)
            if states[0].dtype == torch.float32:
                _store_moment(part[0], m)
            else:
                encode_momentum(m, part, replace(rounding, first=rounding.first + begin))
            grad[block].copy_(_added(m, m - g, -scalars.lag))

    def _descend(
        self,
        weight: Tensor,
        lo: Tensor | None,
        direction: Tensor,
        scalars: DescentScalars,
        num_threads: int,
    ) -> None:
        for begin in range(0, direction.numel(), BLOCK):
            block = slice(begin, begin + BLOCK)
            rest = None if lo is None else lo[block]
            master = weight[block] if rest is None else join(weight[block], rest)
            moved = _added(master * scalars.decay, direction[block], -scalars.step_size)
            if rest is None:
                master.copy_(moved)
            else:
                split_into(moved, weight[block], rest)

    def _square_sums(self, grad: Tensor, sums: Tensor, num_threads: int) -> None:
        for index in range(sums.numel()):
            part = grad[index * CHUNK : (index + 1) * CHUNK]
            chunk = torch.zeros(CHUNK, dtype=torch.float64)
            chunk[: part.numel()].copy_(part).square_()
            rows = chunk.view(-1, ROW)
            total = rows[0]
            for row in rows[1:]:
                total += row
            while total.numel() > 1:
                first, second = total.chunk(2)
                total = first.add_(second)
            sums[index] = total[0]


def _change(m: Tensor, v: Tensor, grad: Tensor, s: AdamWScalars) -> Tensor:
    """Update the moments and return what the weight loses."""
    g = grad.float() * s.grad_scale
    _store_moment(m, (g * s.one_minus_beta1).sub_(m * s.one_minus_beta1).add_(m))
    _store_moment(v, (g * s.one_minus_beta2).mul_(g).add_(v.mul_(s.beta2)))
    # torch's fp32 root is off by one bit in 0.6 % of numbers; rounding the fp64 root is exact
    denom = v.double().sqrt_().float().mul_(s.denom_scale).add_(s.eps)
    return torch.div(m, denom, out=denom).mul_(s.step_size)


def _added(x: Tensor, y: Tensor, factor: float) -> Tensor:
    """Return x + y * factor, in fp64 and rounded once to fp32."""
    return x.double().add_(y.double().mul_(factor)).float()


def _store_moment(moment: Tensor, value: Tensor) -> None:
    moment.copy_(torch.nn.functional.hardshrink(value, LARGEST_DENORMAL))


def _part(state: Tensor, num_elements: int, block: slice) -> Tensor:
    shared = num_elements // state.numel()
    return state[block.start // shared : block.stop // shared]


def _rounded_change(
    states: Sequence[Tensor], grad: Tensor, f: FoldedScalars, rounding: Rounding
) -> Tensor:
    """The same for moments that are rounded when they are stored."""
    g = grad.float().clamp(-LARGEST_GRAD, LARGEST_GRAD)
    m, v = decode(states)
    m.mul_(f.beta1).add_(g * f.grad_to_m)
    v.mul_(f.beta2).add_((g * f.grad_to_v).square_())
    encode(m, v, states, rounding)
    d = v.double().sqrt_().float().add_(f.eps).view(-1, 2)  # (pairs, 2)
    product = d[:, :1] * d[:, 1:]
    ratio = torch.full_like(product, f.step_size).div_(product)  # a number / tensor rounds twice
    return (m.view(-1, 2) * ratio).mul_(d.flip(1)).view(-1)
