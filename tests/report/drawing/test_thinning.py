"""The laws of thinning, and that taking every n-th point would break them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.report.drawing.thinning import Point, averaged, pieces, smoothed, thinned

VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf))
CURVES = st.lists(VALUES, min_size=1, max_size=300).map(lambda values: list(enumerate(values)))


def finite(points: list[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def keeps_the_extremes(points: list[Point], kept: list[Point]) -> bool:
    return {min(v for _, v in points), max(v for _, v in points)} <= {v for _, v in kept}


@given(CURVES, st.integers(1, 20))
def test_thinning_keeps_ends_extremes_order_and_gaps(points: list[Point], buckets: int) -> None:
    kept = thinned(points, buckets)
    assert len(kept) <= 5 * buckets
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert (len(finite(points)) == len(points)) == (len(finite(kept)) == len(kept))
    if drawn := finite(points):
        assert keeps_the_extremes(drawn, finite(kept))
        assert finite(kept)[0] == drawn[0]
        assert finite(kept)[-1] == drawn[-1]


def test_every_nth_point_would_lose_the_spike() -> None:
    points = [(step, 40.0 if step == 777 else 1.0) for step in range(10_000)]
    assert keeps_the_extremes(points, thinned(points, 100))
    assert not keeps_the_extremes(points, points[::100])


@given(CURVES)
def test_pieces_are_what_is_finite(points: list[Point]) -> None:
    assert [point for piece in pieces(points) for point in piece] == finite(points)


def test_smoothing_is_neither_late_nor_led_by_what_is_not_finite() -> None:
    falling = [(step, 5.0 - step / 100) for step in range(400)]
    assert all(abs(value - falling[step][1]) < 1e-3 for step, value in smoothed(falling)[100:300])
    flat = [(step, math.nan if step % 3 else 1.0) for step in range(60)]
    assert smoothed(flat) == [(step, 1.0) for step in range(0, 60, 3)]
    assert smoothed([(0, 1.0), (1, math.nan), (2, 9.0)]) == [(0, 1.0), (2, 9.0)]


def test_a_smoothed_curve_starts_at_its_first_value_and_is_symmetric_near_it() -> None:
    steep = [(step, 6.77 * 0.95**step) for step in range(400)]
    smooth = smoothed(steep)
    assert smooth[0] == pytest.approx(steep[0])
    straight = [(step, 9.0 - step / 100) for step in range(400)]
    for (_, value), (_, meant) in zip(smoothed(straight)[:200], straight, strict=False):
        assert value == pytest.approx(meant)  # as many from before as from after


def test_means_of_stretches() -> None:
    assert averaged([(1, 1.0), (2, 3.0), (3, 5.0), (4, math.nan)], 2) == [(1, 2.0), (3, 5.0)]
    assert averaged([], 2) == []
