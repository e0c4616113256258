"""Axes, thinning and smoothing; taking every n-th point would break thinning."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.report.charts import (
    Axis,
    Series,
    line_chart,
    smoothed,
    step_axis,
    thinned,
    value_axis,
)
from megatrain.report.run import Point

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


def test_a_line_has_gaps_where_values_are_not_finite() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, math.inf), (6, 2.0), (7, 1.0)]
    chart = line_chart("Loss", [Series(label="", points=points, look="strong", color=8)])
    drawn = [path for path in chart.split("<path")[1:] if "grid" not in path]
    assert ["dot" in path for path in drawn] == [False, True, False]
    assert all('class="strong c1' in path for path in drawn)
    assert "not finite: step 3 and 1 later" in chart
    assert line_chart("Loss", []) == ""


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


@given(st.lists(st.floats(-1e200, 1e200), min_size=1))
def test_an_axis_holds_every_value_and_few_labels(values: list[float]) -> None:
    axis = value_axis(values)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)
    assert len(axis.ticks()) <= 10
    assert all(-1e-6 <= place <= 1 + 1e-6 for place, _ in axis.ticks())


def test_one_spike_does_not_press_the_curve_flat() -> None:
    assert value_axis([1.0, 1.1, 0.9, 4000.0]).log
    assert not value_axis([1.0, 1.1, 0.9, 4.0]).log
    assert [label for _, label in Axis(low=0.5, high=40, log=True).ticks()] == [
        "0.5", "1", "2", "5", "10", "20"]  # fmt: skip


def test_labels_are_round() -> None:
    assert [label for _, label in step_axis(0, 2000).ticks()] == [
        "0", "500", "1,000", "1,500", "2,000"]  # fmt: skip
    assert [label for _, label in step_axis(7, 9).ticks()] == ["7", "8", "9"]
    assert step_axis(7, 7).place(7) == 0
