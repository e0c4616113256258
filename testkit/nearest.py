"""AdamW whose moments are rounded to nearest: what stochastic rounding is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megatrain.optim.kernel import AdamWScalars
from megatrain.optim.rounding import Rounding
from megatrain.optim.torch_kernel import TorchKernel

HALVES = 0x80008000 - 2**32
"""Half of each moment's 16 random bits, as int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest(Rounding):
    """Rounds up from the middle between two numbers on."""

    def bits(self, begin: int, end: int) -> Tensor:
        return torch.full((end - begin,), HALVES, dtype=torch.int32)


class NearestKernel(TorchKernel):
    """The kernel by torch, with moments rounded to nearest."""

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
        nearest = Nearest(**asdict(rounding))
        super()._adamw(weight, lo, states, grad, scalars, nearest, num_threads)
