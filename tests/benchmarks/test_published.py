"""Predictions on trial: each system's own schedule against the speed that was published of it."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.published.claims import CLAIMS, Claim
from benchmarks.published.points import EXPLAINED, POINTS, Point
from benchmarks.published.trial import (
    ceiling,
    error_at,
    median_error,
    ours,
    since_async,
    verdicts,
)

NAMES = [point.name for point in POINTS]
BEATEN = {"LLMQ Qwen2.5-7B 5060 Ti 524288/32768", "LLMQ Qwen2.5-7B 4090 524288/16384"}
"""Faster than our ceiling, by 12 and 1 %: these cards hold a higher clock than their sheets say,
and no profile counts on that."""
found = cache(verdicts)


@pytest.mark.merge
def test_the_median_error_is_at_most_12_percent_and_nine_in_ten_are_within_22() -> None:
    assert median_error(found()) <= 0.12
    known = [verdict for verdict in found() if not verdict.point.step_is_assumed]
    assert median_error(known) <= 0.12
    assert error_at(found(), 0.9) <= 0.22


def test_each_far_miss_is_explained_and_nothing_else() -> None:
    assert {verdict.point.name for verdict in found() if verdict.is_far} == set(EXPLAINED)


@pytest.mark.merge
@pytest.mark.parametrize("point", POINTS, ids=NAMES)
def test_the_ceiling_is_not_below_what_was_reached(point: Point) -> None:
    above = ceiling(point)
    assert (above < point.published) is (point.name in BEATEN)
    assert above > 0.88 * point.published
    least = 0.25 if point.fp16_sums else 0.5  # ours add up in fp32
    assert least < ours(point).tokens_per_s / above < 1


@pytest.mark.merge
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_what_others_say_fits_is_what_the_planner_says(claim: Claim) -> None:
    assert claim.predicted() is claim.fits


def test_zero_3_is_also_predicted_as_it_is_since_its_gradients_leave_asynchronously() -> None:
    """At most 28 % of backward is saved, and only ZeRO-3 has the change."""
    now = [since_async(verdict) for verdict in found()]
    assert [one is not None for one in now] == [v.point.system == "ZeRO-3" for v in found()]
    for before, after in zip(found(), now, strict=True):
        if after is not None:
            assert before.predicted < after.predicted < before.predicted / (1 - 0.28)


# What would be noticed.
