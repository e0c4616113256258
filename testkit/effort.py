"""What work costs in processor time, counted in loops of plain Python that run in turns with it.

Wall-clock time depends on who else uses the machine, and even processor time grows when a neighbor
shares the core or the clock slows down. The loop slows down with the work, so the ratio stays.
A loop takes about 65 ms on a server core of 2023. Limits leave room for a factor of three or more:
they find work that grew out of bounds, and `benchmarks/` finds the rest.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable

TRIES = 5


def children_s() -> float:
    """Return the processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def require_effort(
    work: Callable[[], object],
    *,
    at_most: float,
    clock: Callable[[], float] = time.process_time,
) -> None:
    """Raise AssertionError unless one of a few tries of `work` takes `at_most` loops or fewer.

    `clock` counts processor time: of this process, or `children_s`.
    """
    least = math.inf
    for _ in range(TRIES):
        before = loop_s()
        taken = _spent(work, clock)
        least = min(least, taken / ((before + loop_s()) / 2))
        if least <= at_most:
            return
    raise AssertionError(f"{least:.2f} loops of processor time; {at_most:g} are allowed")


def loop_s() -> float:
    """Return the processor time of one loop."""
    return _spent(_loop, time.process_time)


def _loop() -> None:
    seen: dict[int, str] = {}
    for number in range(200_000):
        seen[number % 1000] = str(number) + "x"


def _spent(work: Callable[[], object], clock: Callable[[], float]) -> float:
    begin = clock()
    work()
    return clock() - begin
