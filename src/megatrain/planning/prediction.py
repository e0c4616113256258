"""Predictions for people: a range as wide as the planner's own error, never a single number.

The planner was compared with published runs (docs/planner.md, Published results): the measured time
of more than nine in ten is within TIME_ERROR of the predicted time. Every predicted time, speed and
price is printed with that range, whether doctor has measured the machine or not: on a measured
machine of two shared cores, steps took 0.83 to 1.19 of their prediction, which is no narrower.

Invariants (tests/planning/test_prediction.py)
    1. A printed range holds all values within TIME_ERROR of the predicted time.
    2. TIME_ERROR covers at least 90 % of the published runs.
    3. Both ends have two significant digits; a price has no more than cents.
"""

from __future__ import annotations

import math
from collections.abc import Callable

TIME_ERROR = 0.25
"""Fraction of the predicted time, up and down, that holds nine in ten published runs."""
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))

Range = tuple[float, float]
"""The low and the high end."""


def time_range(seconds: float) -> Range:
    """Return the range of a predicted time; that of a price is the same."""
    return seconds * (1 - TIME_ERROR), seconds * (1 + TIME_ERROR)


def speed_range(per_s: float) -> Range:
    """Return the range of a predicted speed: the longest time gives the lowest."""
    return per_s / (1 + TIME_ERROR), per_s / (1 - TIME_ERROR)


def format_range(ends: Range, write: Callable[[float], str], least: float = 0.0) -> str:
    """Return a range as text, each end rounded outward to two digits, or to `least`."""
    low, high = ends
    down, up = _rounded(low, math.floor, least), _rounded(high, math.ceil, least)
    return f"{write(down)} to {write(up)}"


def predicted_speed(per_s: float) -> str:
    """Return tokens per second for people: 1.7k to 3.0k tok/s."""
    return f"{format_range(speed_range(per_s), _count)} tok/s"


def predicted_time(seconds: float) -> str:
    """Return a time for people, in one unit: 55 to 93 min."""
    low, high = time_range(seconds)
    unit, name = next((each for each in _TIMES if low >= each[0]), _TIMES[-1])
    return f"{format_range((low / unit, high / unit), _digits)} {name}"


def predicted_price(dollars: float) -> str:
    """Return a price for people: $0.31 to $0.53."""
    return format_range(time_range(dollars), _price, least=0.01)


def with_range(name: str, value: float, range_of: Callable[[float], Range]) -> dict[str, float]:
    """Return a predicted figure for a program: the number, and both ends of its range."""
    low, high = range_of(value)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _rounded(value: float, direction: Callable[[float], int], least: float) -> float:
    """Return `value` rounded to two significant digits, or to `least` if that is coarser."""
    if value <= 0:
        return 0.0
    quantum = max(10.0 ** (math.floor(math.log10(value)) - 1), least)
    steps = value / quantum
    whole = round(steps)  # 0.3 / 0.1 is 2.9999999999999996
    return quantum * (whole if math.isclose(steps, whole, rel_tol=1e-9) else direction(steps))


def _digits(value: float) -> str:
    if 0 < value < 0.995:
        return f"{value:.2g}"
    return f"{value:.1f}" if 0 < value < 9.95 else f"{value:,.0f}"


def _count(value: float) -> str:
    unit, letter = next((each for each in _COUNTS if value >= 0.999 * each[0]), _COUNTS[-1])
    return f"{_digits(value / unit)}{letter}"


def _price(value: float) -> str:
    return f"${value:,.2f}" if value < 9.995 else f"${value:,.0f}"
