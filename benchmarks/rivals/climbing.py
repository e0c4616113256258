"""The highest rung that holds, found in few trials: gallop from a guess, then halve.

A trial can take minutes. With a good guess there are two: one that holds and the next that does
not. It is assumed that whoever fails on a rung fails on those above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator


def highest_rung(holds: Callable[[int], bool], guess: int) -> int | None:
    """Return the highest rung that `holds`, or None if rung 0 does not. No rung is tried twice."""
    low, high = _bracket(holds, max(guess, 0))
    while low is not None and high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _bracket(holds: Callable[[int], bool], guess: int) -> tuple[int | None, int]:
    """Return a rung that holds, or None if none does, and one above it that does not."""
    strides = _strides()
    if holds(guess):
        low, high = guess, guess + next(strides)
        while holds(high):
            low, high = high, high + next(strides)
        return low, high
    high = guess
    while high > 0:
        low = max(0, high - next(strides))
        if holds(low):
            return low, high
        high = low
    return None, high


def _strides() -> Iterator[int]:
    """Yield 1, 1, 2, 4, 8 and so on: a guess is rarely far off."""
    yield 1
    stride = 1
    while True:
        yield stride
        stride *= 2
