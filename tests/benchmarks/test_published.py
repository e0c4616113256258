"""The simulator against published speeds: its ceiling is never below what others have reached."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.published import POINTS, best, perfect


@cache
def _speeds(number: int) -> tuple[float, float]:
    """Return ceiling and expected of a point, in tokens/s."""
    point = POINTS[number]
    ceiling = best(point, perfect(point.profile)).tokens_per_s
    return ceiling, best(point, point.profile).tokens_per_s


ids = [f"{point.who}-{point.model}-{point.machine}-{point.step_tokens}" for point in POINTS]


@pytest.mark.parametrize("number", range(len(POINTS)), ids=ids)
def test_the_ceiling_is_not_below_what_was_reached(number: int) -> None:
    ceiling, _ = _speeds(number)
    assert ceiling >= POINTS[number].reached
    assert ceiling <= 2.2 * POINTS[number].reached, "so far above that it would say nothing"


@pytest.mark.parametrize("number", range(len(POINTS)), ids=ids)
def test_what_is_expected_lies_below_the_ceiling(number: int) -> None:
    ceiling, expected = _speeds(number)
    assert 0.5 < expected / ceiling < 1


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
