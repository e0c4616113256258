"""What a tool did in each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatrain.batch import MicroBatch


@dataclass(slots=True, kw_only=True)
class History:
    """Step by step."""

    losses: list[float] = field(default_factory=list)
    """Means over the rows of a step."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """By param."""
    batches: list[list[MicroBatch]] = field(default_factory=list)
    """The micro-batches, without references."""

    def worst_loss(self, other: History) -> float:
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))

    def worst_gradient(self, other: History) -> float:
        """Return the largest difference, as a share of the largest element of its step."""
        worst = 0.0
        for ours, theirs in zip(self.gradients, other.gradients, strict=True):
            assert ours.keys() == theirs.keys()
            largest = max(float(gradient.abs().max()) for gradient in theirs.values())
            for name, gradient in theirs.items():
                worst = max(worst, float((ours[name] - gradient).abs().max()) / largest)
        return worst
