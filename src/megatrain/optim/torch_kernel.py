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
from megatrain.optim.kernel import CHUNK, AdamWScalars, Kernel
from megatrain.optim.rounding import Rounding
from megatrain.optim.state_codes import decode, encode

BLOCK = 131072
"""Elements per block: with its five temporaries about 4 MiB, within the cache of two cores."""

ROW = 1024
"""Elements per row of a chunk, as in kernel.c: rows are added up, then the row is folded."""

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
            stored = [state[block] for state in states]
            m, v = decode(stored)
            change = _change(m, v, grad[block], scalars)
            encode(m, v, stored, replace(rounding, first=rounding.first + begin))
            if lo is None:
                weight[block].mul_(scalars.decay).sub_(change)
            else:
                master = join(weight[block], lo[block])
                split_into(master.mul_(scalars.decay).sub_(change), weight[block], lo[block])

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


def _store_moment(moment: Tensor, value: Tensor) -> None:
    moment.copy_(torch.nn.functional.hardshrink(value, LARGEST_DENORMAL))
