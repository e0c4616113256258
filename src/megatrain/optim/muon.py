"""Muon for the matrices of hidden layers, AdamW for all other params.

A step of Muon has three parts, the second of them on the device:

    look_ahead        host     momentum and gradient become a direction, in the gradient's place
    orthogonalized    device   a direction becomes the nearest matrix with singular values near 1
    update            host     the weight moves along it

Momentum, Nesterov's look ahead and five Newton-Schulz steps in bf16 are those of its author (Keller
Jordan, 2024); the step is longer for larger matrices as in Moonlight (arXiv 2502.16982), so that
its elements move as those of AdamW do: one learning rate and one decay are for both.

Laws (tests/optim/test_muon_kernel.py, tests/engine/test_muon.py)
    1. Weights are those of torch.optim.Muon over the resident model within 1e-6 after 300 steps.
    2. The bits do not depend on the number of micro-batches, nor on what a device copies.
    3. Each expert of a mixture is a matrix of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.memory.kinds import TensorKind
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import DescentScalars, MomentumScalars
from megatrain.optim.rounding import Rounding
from megatrain.optim.states import STATES
from megatrain.optim.views import Views

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""A polynomial that takes all singular values between 0 and 1 near 1, in few steps."""
NUM_STEPS = 5
_LEAST_NORM = 1e-7
AT_ONCE = 1 << 26
"""Elements of experts that are orthogonalized at once; a matrix alone may have more."""
MATCHED_RMS = 0.2
"""Root mean square of AdamW's usual steps, which a step of Muon is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(AdamW):
    """Muon with decoupled weight decay; embeddings, head, norms and biases have AdamW."""

    momentum: float = 0.95
    """At least a half."""

    @property
    def states(self) -> tuple[TensorKind, ...]:
        return STATES["muon"][self.state]

    def look_ahead(self, views: Views, gradient: Tensor, *, number: int, scale: float) -> None:
        """Move the momentum by `scale` x `gradient`, and write the direction over the gradient."""
        assert math.isfinite(scale), scale
        self.kernel.momentum(
            views.states,
            gradient,
            MomentumScalars.of(self.momentum, scale),
            Rounding(seed=self.seed, update=number, first=views.first),
            num_threads=self.num_threads,
        )

    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        """Move matrices along their orthogonalized direction, and all others as AdamW does."""
        if views.matrix is None:
            # A dataclass with slots is another class than the one that a bare `super` means.
            AdamW.update(self, views, gradient, step=step, number=number, scale=scale)
            return
        rate = self.rate(step, views.treatment)
        self.kernel.descend(
            views.weight,
            views.lo,
            gradient,
            DescentScalars(
                decay=1 - rate * views.treatment.weight_decay,
                step_size=rate * (MATCHED_RMS * math.sqrt(max(views.matrix))),
            ),
            num_threads=self.num_threads,
        )


def orthogonalize(directions: Tensor) -> None:
    """Replace a matrix (rows, columns), or each of several (experts, rows, columns), in place.

    Experts come AT_ONCE elements at a time, in groups that depend on their shape alone.
    """
    if directions.dim() == 2:
        directions.copy_(orthogonalized(directions))
        return
    count = max(1, AT_ONCE // directions[0].numel())
    for first in range(0, len(directions), count):
        group = directions[first : first + count]
        group.copy_(orthogonalized(group[0] if len(group) == 1 else group))


def orthogonalized(directions: Tensor) -> Tensor:
    """Return U S V' with S near 1 for directions U D V', in bf16: one matrix or a batch of them."""
    x = directions.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    norm = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=_LEAST_NORM)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    first, third, fifth = COEFFICIENTS
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        gram = multiply_add(gram, gram, gram, beta=third, alpha=fifth)
        x = multiply_add(x, gram, x, beta=first)
    return x.mT if is_tall else x
