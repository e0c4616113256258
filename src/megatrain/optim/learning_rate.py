"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

    peak       ____________
              /            \\
             /              \\
            /                \\_____ final
           warm-up   hold    decay

Every shape is these three parts; they differ in where the decay begins and how it bends.

    constant   never decays
    linear     a straight line from the end of warm-up to the end of the run
    cosine     half a cosine over the same steps
    wsd        warm-up, stable, decay: holds the peak, then a straight line over the last steps

Steps count from 0. No step is wasted on a rate of zero: warm-up begins at peak / warm-up steps and
its last step has the peak; the decay leaves the peak after its first step and would reach the final
rate one step after the run. Beyond the run the final rate stays.

Laws (tests/optim/test_learning_rate.py): closed forms at both ends; never above the peak; never
falls in warm-up, never rises after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatrain.errors import ConfigError

Shape = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """`rate(step)` for each step of a run; refuses lengths that do not fit the run."""

    peak: float
    shape: Shape
    num_steps: int
    """Steps of the whole run, warm-up included."""
    warmup: int | float = 0
    """Steps if an integer; a fraction of the run, below 1, if not."""
    decay: int | float = 0.1
    """The same, for the last part of `wsd`; other shapes do not read it."""
    final_fraction: float = 0.0
    """The final rate as a fraction of the peak."""

    def __post_init__(self) -> None:
        if not (self.peak > 0 and math.isfinite(self.peak)):
            raise ConfigError(f"learning rate: the peak is {self.peak}; give one above 0.")
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(
                f"learning rate: final_fraction is {self.final_fraction}; give 0 to 1, 1 being "
                "the peak."
            )
        if self.warmup_steps + self.decay_steps > self.num_steps:
            raise ConfigError(
                f"learning rate: {self.warmup_steps} steps of warm-up and {self.decay_steps} of "
                f"decay do not fit a run of {self.num_steps}. Shorten them or give fractions "
                "of the run, like 0.03."
            )

    @property
    def warmup_steps(self) -> int:
        return _steps("warmup", self.warmup, self.num_steps)

    @property
    def decay_steps(self) -> int:
        """Length of the last part."""
        if self.shape == "constant":
            return 0
        if self.shape == "wsd":
            return _steps("decay", self.decay, self.num_steps)
        return max(0, self.num_steps - self.warmup_steps)

    def rate(self, step: int) -> float:
        """The rate of update `step`, counted from 0."""
        assert step >= 0, step
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decay_begin = self.num_steps - self.decay_steps
        if step <= decay_begin or self.decay_steps == 0:
            return self.peak
        progress = min(1.0, (step - decay_begin) / self.decay_steps)
        remaining = _CURVES[self.shape](progress)
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * remaining)


_CURVES: dict[Shape, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "wsd": lambda progress: 1 - progress,
}
"""What is left of the way from peak to final, by the part of the decay that is done."""


def _steps(name: str, length: int | float, num_steps: int) -> int:
    if isinstance(length, int):
        if length < 0:
            raise ConfigError(f"learning rate: {name} is {length} steps; give 0 or more.")
        return length
    if not 0 <= length < 1:
        raise ConfigError(
            f"learning rate: {name} is {length}; an integer means steps, a fraction of the run "
            "lies between 0 and 1."
        )
    return round(length * num_steps)
