"""Axes, thinning and smoothing; taking every n-th point would break thinning."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from megatrain.report.charts import (
    Series,
    line_chart,
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


def test_a_line_has_gaps_where_values_are_not_finite() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, math.inf), (6, 2.0), (7, 1.0)]
    chart = line_chart("Loss", [Series(label="", points=points, look="strong", color=8)])
    drawn = [path for path in chart.split("<path")[1:] if "grid" not in path]
    assert ["dot" in path for path in drawn] == [False, True, False]
    assert all('class="strong c1' in path for path in drawn)
    assert "not finite: step 3 and 1 later" in chart
    assert line_chart("Loss", []) == ""


@given(st.lists(st.floats(-1e200, 1e200), min_size=1))
def test_an_axis_holds_every_value_and_few_labels(values: list[float]) -> None:
    axis = value_axis(values)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)
    assert len(axis.ticks()) <= 10
    assert all(-1e-6 <= place <= 1 + 1e-6 for place, _ in axis.ticks())
