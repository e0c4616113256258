"""AdamW as a textbook has it, on separate fp32 masters: the other side of the update's equalities.

Nothing here knows of stores, segments, kernels or splits. Numpy's operations round once each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from megatrain.models.decoder import Param

SMALLEST_NORMAL = np.float32(torch.finfo(torch.float32).tiny)


class HandAdamW:
    """Masters and moments by param name."""

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decays: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.masters = {name: master.clone() for name, master in masters.items()}
        self.m = {name: torch.zeros_like(master) for name, master in masters.items()}
        self.v = {name: torch.zeros_like(master) for name, master in masters.items()}
        self._lr, self._betas, self._eps = lr, betas, eps
        self._weight_decay, self._decays = weight_decay, decays

    def update(self, gradients: Mapping[str, Tensor], number: int, scale: float = 1.0) -> None:
        """Apply update `number`, counted from 1."""
        f = np.float32
        beta1, beta2 = self._betas
        for name, gradient in gradients.items():
            decay = self._weight_decay if self._decays(name) else 0.0
            p, m, v = (kind[name].numpy() for kind in (self.masters, self.m, self.v))
            g = gradient.float().numpy() * f(scale)
            m += g * f(1 - beta1) - m * f(1 - beta1)
            m[np.abs(m) < SMALLEST_NORMAL] = 0
            v[...] = v * f(beta2) + g * f(1 - beta2) * g
            v[v < SMALLEST_NORMAL] = 0
            root = np.sqrt(v) * f(1 / math.sqrt(1 - beta2**number)) + f(self._eps)
            p[...] = p * f(1 - self._lr * decay) - m / root * f(self._lr / (1 - beta1**number))


def global_norm(gradients: Iterable[Tensor]) -> float:
    """The square root of the exact sum of all squares."""
    squares = (part.double().square().flatten().tolist() for part in gradients)
    return math.sqrt(math.fsum(square for part in squares for square in part))


def is_matrix(param: Param) -> bool:
    return len(param.shape) >= 2
