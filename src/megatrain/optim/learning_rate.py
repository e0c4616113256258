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

Steps count from 0. The rates are those of transformers' schedulers, to the last bit: step k of w
warm-up steps has k/w of the peak, so the first step of a warm-up has a rate of 0 and moves only
Adam's moments; the step after the warm-up has the peak; the decay would reach the final rate one
step after the run. Beyond the run the final rate stays.

A fraction of the run is rounded up, as transformers does it, but leaves at least one step: a run
of one step would otherwise have no rate but 0.

Laws (tests/optim/test_learning_rate.py): equal to transformers.get_scheduler; closed forms at both
ends; never above the peak; never falls in warm-up, never rises after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatrain.errors import ConfigError

Shape = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """`rate(step)` for each step of a run; refuses lengths that do not fit the run."""

    peak: float
    shape: Shape
    num_steps: int
    """Steps of the run, warm-up included."""
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
        if self.warmup_steps == self.num_steps == 1:
            raise ConfigError(
                "learning rate: warmup is 1 step of a run of 1, and the first step of a warm-up "
                "has a rate of 0: nothing would be trained. Set optim.warmup to 0."
            )
        parts = (self.warmup, self.decay if self.shape == "wsd" else 0.0)
        over = all(isinstance(part, float) for part in parts) and sum(parts) > 1
        if over or self.warmup_steps + self.decay_steps > self.num_steps:
            raise ConfigError(
                f"learning rate: {self.warmup_steps} steps of warm-up and {self.decay_steps} of "
                f"decay do not fit a run of {self.num_steps}. Shorten them or give fractions "
                "of the run, like 0.03."
            )

    @property
    def warmup_steps(self) -> int:
        _check_length("warmup", self.warmup)
        if isinstance(self.warmup, int):
            return self.warmup
        return min(math.ceil(self.num_steps * self.warmup), self.num_steps - 1)

    @property
    def decay_steps(self) -> int:
        """Length of the last part."""
        if self.shape == "constant":
            return 0
        longest = max(0, self.num_steps - self.warmup_steps)
        if self.shape != "wsd":
            return longest
        _check_length("decay", self.decay)
        if isinstance(self.decay, int):
            return self.decay
        decay = round(self.num_steps * self.decay)
        # Two fractions that add up to the run may be rounded to a step more.
        return min(decay, longest) if isinstance(self.warmup, float) else decay

    def rate(self, step: int) -> float:
        """The rate of step `step` of the run, counted from 0."""
        assert step >= 0, step
        if step < self.warmup_steps:
            return self.peak * (step / self.warmup_steps)
        done = step - (self.num_steps - self.decay_steps)
        if done <= 0 or self.decay_steps == 0:
            return self.peak
        remaining = _CURVES[self.shape](min(done, self.decay_steps), self.decay_steps)
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * remaining)


_CURVES: dict[Shape, Callable[[int, int], float]] = {
    "linear": lambda done, length: (length - done) / length,
    "cosine": lambda done, length: 0.5 * (1 + math.cos(math.pi * (done / length))),
    "wsd": lambda done, length: 1 - done / length,
}
"""The remaining share of the decay from peak to final, by its completed steps."""


def _check_length(name: str, length: int | float) -> None:
    if isinstance(length, int):
        if length < 0:
            raise ConfigError(f"learning rate: {name} is {length} steps; give 0 or more.")
    elif not 0 <= length < 1:
        raise ConfigError(
            f"learning rate: {name} is {length}; give a number of steps, or a fraction of "
            "the run between 0 and 1."
        )
