"""AdamW: fp32 masters, moments in fp32, bf16 or 8 bits, one pass of the kernel per run of params.

The learning rate follows the step of the run, which also counts steps that were skipped or left
out; the bias correction of the moments follows the updates that the elements have had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from megatrain.memory.kinds import TensorKind
from megatrain.optim.kernel import AdamWScalars
from megatrain.optim.optimizer import HostOptimizer
from megatrain.optim.rounding import Rounding
from megatrain.optim.states import STATES
from megatrain.optim.views import Views


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(HostOptimizer):
    """AdamW with decoupled weight decay; norms and biases are not decayed."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    state: str = "fp32"
    """How the moments are stored: a key of STATES["adamw"]."""
    seed: int = 0
    """Seed of stochastic rounding, where the moments are not fp32."""

    @property
    def states(self) -> tuple[TensorKind, ...]:
        return STATES["adamw"][self.state]

    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        """Apply `scale` x `gradient` with the learning rate of `step`."""
        assert math.isfinite(scale), scale
        scalars = AdamWScalars.at(
            number,
            lr=self.rate(step, views.treatment),
            betas=self.betas,
            eps=self.eps,
            weight_decay=views.treatment.weight_decay,
            grad_scale=scale,
        )
        self.kernel.adamw(
            views.weight,
            views.lo,
            views.states,
            gradient,
            scalars,
            Rounding(seed=self.seed, update=number, first=views.first),
            num_threads=self.num_threads,
        )
