"""Predictions are printed as ranges that are no narrower than the planner's error."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from megatrain.planning import prediction
from megatrain.planning.prediction import (
    TIME_ERROR,
    predicted_price,
    predicted_speed,
    predicted_time,
    speed_range,
    time_range,
)

PAGE = (Path(__file__).parents[2] / "docs/planner.md").read_text()
UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2241.0, "1.7k to 3.0k tok/s"),
        (510.0, "400 to 680 tok/s"),
        (27.6, "22 to 37 tok/s"),
        (4.4, "3.5 to 5.9 tok/s"),
        (1250.0, "1.0k to 1.7k tok/s"),
        (10316.0, "8.2k to 14k tok/s"),
        (7.5e6, "6.0M to 10M tok/s"),
    ],
)
def test_speeds(value: float, text: str) -> None:
    assert predicted_speed(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (14.6, "10 to 19 s"),
        (4462.0, "55 to 93 min"),
        (4800.0, "1.0 to 1.7 h"),
        (20040.0, "4.1 to 7.0 h"),
        (442800.0, "3.8 to 6.5 d"),
        (0.5, "370 to 630 ms"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert predicted_time(seconds) == text


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        (0.42, "$0.31 to $0.53"),
        (42.15, "$31 to $53"),
        (1.09, "$0.81 to $1.40"),
        (0.05, "$0.03 to $0.07"),
        (2000.0, "$1,500 to $2,500"),
    ],
)
def test_prices(dollars: float, text: str) -> None:
    assert predicted_price(dollars) == text


def _speed_ends(text: str) -> tuple[float, ...]:
    return tuple(
        float(digits) * COUNTS[letter]
        for digits, letter in re.findall(r"([\d.]+)([kMB]?)(?= to| tok/s)", text)
    )


def _time_ends(text: str) -> tuple[float, ...]:
    *ends, unit = text.replace(" to ", " ").replace(",", "").split()
    return tuple(float(end) * UNITS[unit] for end in ends)


def _narrow() -> list[float]:
    """Return values whose printed range is narrower than the error."""
    chosen, found = random.Random(0), []
    for _ in range(2000):
        value = 10 ** chosen.uniform(0, 6)
        (low, high), (slow, fast) = time_range(value), speed_range(value)
        at_least, at_most = _time_ends(predicted_time(value))
        slowest, fastest = _speed_ends(predicted_speed(value))
        room = 1 + 1e-9
        if at_least > low * room or at_most * room < high:
            found.append(value)
        if slowest > slow * room or fastest * room < fast:
            found.append(value)
    return found


def test_no_printed_range_is_narrower_than_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _narrow() == []
    nearest = lambda value, direction, least: float(f"{value:.2g}")  # noqa: E731
    monkeypatch.setattr(prediction, "_rounded", nearest)
    assert _narrow(), "rounding to the nearest is noticed"


def _covered(share: float) -> float:
    """Return the fraction of the published runs whose time is within `share` of the prediction."""
    runs, _ = PAGE.split("ZeRO-3 since gradients leave")  # the same runs, in a later version
    rows = re.findall(r" ([\d,]+) +([\d,]+) +[+-]\d+% ", runs)
    speeds = [[float(value.replace(",", "")) for value in row] for row in rows]
    assert len(speeds) > 25
    errors = [abs(predicted / published - 1) for published, predicted in speeds]
    return sum(error <= share + 0.005 for error in errors) / len(errors)


def test_the_error_is_that_of_the_published_runs() -> None:
    """A measured time over the predicted one is the predicted speed over the measured one."""
    assert _covered(TIME_ERROR) > 0.9
    assert _covered(TIME_ERROR / 2) < 0.9, "half of it would promise too much"
    (within,) = re.findall(r"points: median error \d+%, .*?(\d+)% within 25 %", PAGE)
    assert round(100 * _covered(TIME_ERROR)) == int(within)
