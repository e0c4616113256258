"""Lion, the second user of the optimizer's seam: the sign of a momentum, and one state.

    c = beta1 m + (1 - beta1) g;  weight = weight (1 - rate decay) - rate sign(c)
    m = beta2 m + (1 - beta2) g

`Lion` is written as an optimizer of the package would be, on views; `PlainLion` as one would write
it for a model in fp32, by param name. Each product, sum and sign rounds by itself, so both give the
same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.memory.kinds import TensorKind, state
from megatrain.memory.master import join, split_into
from megatrain.optim.optimizer import HostOptimizer
from megatrain.optim.views import Views

LION = (state("m", "momentum (m)"),)
EIGHT_BIT = (
    state("m", "momentum in 8 bits (m)", "int8"),
    state("m_scale", "scales of momentum (m_scale)", elements_per_number=128),
)
"""What Lion would keep with a momentum of 8 bits: no update is written for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(HostOptimizer):
    """Lion with decoupled weight decay."""

    betas: tuple[float, float] = (0.9, 0.99)

    @property
    def states(self) -> tuple[TensorKind, ...]:
        return LION

    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        """Apply `scale` x `gradient` with the learning rate of `step`."""
        (m,) = views.states
        rate, (beta1, beta2) = self.rate(step, views.treatment), self.betas
        g = gradient.float() * scale
        sign = (m * beta1 + g * (1 - beta1)).sign()
        m.copy_(m * beta2 + g * (1 - beta2))
        master = views.weight if views.lo is None else join(views.weight, views.lo)
        master.mul_(1 - rate * views.treatment.weight_decay).sub_(sign * rate)
        if views.lo is not None:
            split_into(master, views.weight, views.lo)


class PlainLion:
    """Masters and momenta by param name."""

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        *,
        rate: float,
        weight_decay: float,
        decayed: frozenset[str],
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        self.masters = {name: master.float().clone() for name, master in masters.items()}
        self.momenta = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self._rate, self._weight_decay, self._decayed = rate, weight_decay, decayed
        self._betas = betas

    def update(self, gradients: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Apply the gradients of one step."""
        beta1, beta2 = self._betas
        for name, weight in self.masters.items():
            g, m = gradients[name].float() * scale, self.momenta[name]
            if name in self._decayed:
                weight *= 1 - self._rate * self._weight_decay
            weight -= self._rate * torch.sign(beta1 * m + (1 - beta1) * g)
            self.momenta[name] = beta2 * m + (1 - beta2) * g
