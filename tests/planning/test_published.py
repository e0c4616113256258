"""The simulator against published speeds: its ceiling is never below what others have reached."""

from __future__ import annotations

import pytest

from benchmarks.published import POINTS, Point, best, perfect

ids = [f"{point.who}-{point.model}-{point.machine}-{point.step_tokens}" for point in POINTS]


@pytest.mark.parametrize("point", POINTS, ids=ids)
def test_the_ceiling_is_not_below_what_was_reached(point: Point) -> None:
    ceiling = best(point, perfect(point.profile)).tokens_per_s
    assert ceiling >= point.reached
    assert ceiling <= 2.2 * point.reached, "so far above that nothing would be learnt from it"


@pytest.mark.parametrize("point", POINTS, ids=ids)
def test_what_is_expected_lies_below_the_ceiling(point: Point) -> None:
    expected = best(point, point.profile).tokens_per_s
    assert 0.5 < expected / best(point, perfect(point.profile)).tokens_per_s < 1


def test_a_wrong_machine_would_be_noticed() -> None:
    llmq = POINTS[0]
    halved = tuple(rate._replace(flops=rate.flops / 2) for rate in llmq.profile.forward_flops)
    slower = perfect(llmq.profile.changed(forward_flops=halved))
    assert best(llmq, slower).tokens_per_s < llmq.reached


def test_a_narrow_link_and_slow_memory_would_be_noticed() -> None:
    deepspeed = POINTS[1]
    narrow = perfect(deepspeed.profile.changed(copy_in_bytes_per_s=3e9))
    assert best(deepspeed, narrow).bottleneck == "link in"
    assert best(deepspeed, narrow).tokens_per_s < deepspeed.reached
    slow = perfect(deepspeed.profile.changed(update_params_per_s=6e8))
    assert best(deepspeed, slow).bottleneck == "optimizer"
    assert best(deepspeed, slow).tokens_per_s < deepspeed.reached
