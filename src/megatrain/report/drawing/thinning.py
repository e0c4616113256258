"""Curves of any length in a bounded number of points, with every spike still in them.

A point is a step and a value. A value may be not finite: it is kept as a gap.

Laws (tests/report/drawing/test_thinning.py)
    1. The first and last point, the least and the greatest value survive thinning.
    2. Points come out in the order they went in, at most five per bucket.
    3. A bucket that held a value that is not finite still holds one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Point = tuple[int, float]
FEW = 20
"""With fewer points a smoothed curve adds nothing."""


def thinned(points: Sequence[Point], num_buckets: int) -> list[Point]:
    """Return of each bucket of steps the first, least, greatest and last point, and one gap."""
    if len(points) <= 5 * num_buckets:
        return list(points)
    return [point for bucket in _buckets(points, num_buckets) for point in _kept(bucket)]


def averaged(points: Sequence[Point], num_buckets: int) -> list[Point]:
    """Return one point per bucket of steps: its first step, and the mean of its finite values."""
    means = []
    for bucket in _buckets(points, num_buckets):
        values = [value for _, value in bucket if math.isfinite(value)]
        if values:
            means.append((bucket[0][0], math.fsum(values) / len(values)))
    return means


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the mean around each finite value, weights halving every hundredth of the curve.

    It looks both ways, and near the start no farther ahead than back, so a falling curve is neither
    drawn late nor begun low: it starts at its first value. A few points stay as they are.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if len(points) < FEW:
        return finite
    keep = 0.5 ** (1 / max(2.0, len(finite) / 100))
    before = _trailing([value for _, value in finite], keep)
    after = _trailing([value for _, value in reversed(finite)], keep)[::-1]
    smooth = []
    for place, (step, value) in enumerate(finite):
        (total, weight), (later, more) = before[place], after[place]
        beyond = 2 * place + 1  # the first one that is farther ahead than the start is back
        if beyond < len(finite):
            lost = keep ** (place + 1)
            later, more = later - lost * after[beyond][0], more - lost * after[beyond][1]
        smooth.append((step, (total + later - value) / (weight + more - 1)))
    return smooth


def _trailing(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """Return for each value the weighted sum up to it, and the sum of the weights."""
    total = weight = 0.0
    sums = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        sums.append((total, weight))
    return sums


def pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the stretches between values that are not finite."""
    piece: list[Point] = []
    for point in points:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _buckets(points: Sequence[Point], num_buckets: int) -> Iterator[list[Point]]:
    """Yield the points in each of equal ranges of steps; points come in the order of steps."""
    if not points:
        return
    first, last = points[0][0], points[-1][0]
    width = (last - first + 1) / num_buckets
    bucket: list[Point] = []
    number = 0
    for point in points:
        if bucket and int((point[0] - first) / width) != number:
            yield bucket
            bucket = []
        number = int((point[0] - first) / width)
        bucket.append(point)
    yield bucket


def _kept(bucket: list[Point]) -> list[Point]:
    finite = [number for number, (_, value) in enumerate(bucket) if math.isfinite(value)]
    gaps = [number for number, (_, value) in enumerate(bucket) if not math.isfinite(value)]
    kept = set(gaps[:1])
    if finite:
        least = min(finite, key=lambda number: bucket[number][1])
        greatest = max(finite, key=lambda number: bucket[number][1])
        kept |= {finite[0], least, greatest, finite[-1]}
    return [bucket[number] for number in sorted(kept)]
