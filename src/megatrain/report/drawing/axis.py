"""From values to places between 0 and 1, and round numbers to label them with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from megatrain.text import figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values; `low` is below `high`, and above 0 where `log` is set."""

    low: float
    high: float
    log: bool = False
    """Equal steps are equal factors."""
    whole: bool = False
    """Only integers are labeled."""

    def place(self, value: float) -> float:
        """Return the position of `value`: 0 at `low`, 1 at `high`."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)  # high / low may be too large
            return (math.log(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and labels of a few round values within the range."""
        least = 1.0 if self.whole else 0.0
        values = (
            _powers(self.low, self.high) if self.log else _round_values(self.low, self.high, least)
        )
        return [(self.place(value), figure(value)) for value in values]


def step_axis(steps: Iterable[int]) -> Axis:
    """Return the axis from the first to the last step."""
    known = list(steps) or [0]
    low, high = min(known), max(known)
    return Axis(low=low, high=high if high > low else low + 1, whole=True)


def value_axis(values: Iterable[float], *, from_zero: bool = False) -> Axis:
    """Return an axis that holds every finite value, with a margin.

    Where the greatest is more than 30 times the middle one it is logarithmic, so that one spike
    does not press the curve flat.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    if low > 0 and not from_zero and high > 30 * median_low(known):
        return Axis(low=low / 1.2, high=high * 1.2, log=True)
    low = min(low, 0.0) if from_zero else low
    # A range too narrow for float64 to divide is widened until labels differ.
    margin = max(0.05 * (high - low), 1e-4 * abs(high)) or 1.0
    return Axis(low=low if from_zero and low == 0 else low - margin, high=high + margin)


def _round_values(low: float, high: float, least: float) -> list[float]:
    """Return up to six multiples of 1, 2 or 5 times a power of ten, `least` or more apart."""
    rough = max((high - low) / 4, least)
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.99)
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [number * width for number in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return at most six powers of ten, or 1, 2 and 5 times each where that is few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    stride = max(1, -(-(last - first + 1) // 6))
    values = [10.0**power * factor for power in range(first, last, stride) for factor in factors]
    return [value for value in values if low <= value <= high]
