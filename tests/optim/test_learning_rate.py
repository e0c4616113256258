"""Laws of the learning rate: closed forms at the ends, bounds, monotonicity, refusals."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.errors import ConfigError, MegaTrainError
from megatrain.optim.learning_rate import LearningRate, Shape

SHAPES = get_args(Shape)


def rates(schedule: LearningRate) -> list[float]:
    return [schedule.rate(step) for step in range(schedule.num_steps + 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_rises_from_one_part_to_the_peak(shape: Shape) -> None:
    schedule = LearningRate(peak=3e-4, shape=shape, num_steps=100, warmup=10)
    assert schedule.rate(0) == 3e-4 / 10
    assert [schedule.rate(step) for step in (4, 9, 10)] == [3e-4 / 2, 3e-4, 3e-4]


@pytest.mark.parametrize("shape", SHAPES)
def test_without_warmup_the_first_step_has_the_peak(shape: Shape) -> None:
    assert LearningRate(peak=1e-5, shape=shape, num_steps=7).rate(0) == 1e-5


def test_closed_forms_of_the_decay() -> None:
    # 20 steps of warm-up, 80 after it; step 60 is half way, 99 the last of the run
    def at(shape: Shape, step: int) -> float:
        schedule = LearningRate(
            peak=2.0, shape=shape, num_steps=100, warmup=0.2, decay=40, final_fraction=0.1
        )
        return schedule.rate(step)

    assert at("constant", 99) == 2.0
    assert at("linear", 60) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5), rel=1e-15)
    assert at("linear", 99) == pytest.approx(2.0 * (0.1 + 0.9 / 80), rel=1e-14)
    assert at("cosine", 60) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5), rel=1e-15)
    quarter = (1 + math.sqrt(0.5)) / 2
    assert at("cosine", 40) == pytest.approx(2.0 * (0.1 + 0.9 * quarter), rel=1e-15)
    assert at("wsd", 60) == 2.0
    assert at("wsd", 80) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5), rel=1e-15)
    assert at("wsd", 99) == pytest.approx(2.0 * (0.1 + 0.9 / 40), rel=1e-14)
    for shape in ("linear", "cosine", "wsd"):
        assert at(shape, 100) == at(shape, 1000) == pytest.approx(0.2, rel=1e-15)


@given(
    shape=st.sampled_from(SHAPES),
    num_steps=st.integers(1, 300),
    warmup=st.floats(0, 0.5),
    decay=st.floats(0, 0.4),
    final_fraction=st.floats(0, 1),
)
def test_rises_then_never_rises_and_stays_within_bounds(
    shape: Shape, num_steps: int, warmup: float, decay: float, final_fraction: float
) -> None:
    schedule = LearningRate(
        peak=1.0,
        shape=shape,
        num_steps=num_steps,
        warmup=warmup,
        decay=decay,
        final_fraction=final_fraction,
    )
    values = rates(schedule)
    rise, rest = values[: schedule.warmup_steps], values[schedule.warmup_steps :]
    assert rise == sorted(rise)
    assert all(later <= earlier + 1e-15 for earlier, later in itertools.pairwise(rest))
    assert max(values) == 1.0
    assert min(values[:num_steps]) > 0
    assert min(rest) >= final_fraction - 1e-15


def test_steps_and_fraction_are_two_ways_to_say_the_same() -> None:
    def schedule(warmup: float, decay: float) -> list[float]:
        return rates(LearningRate(peak=1.0, shape="wsd", num_steps=200, warmup=warmup, decay=decay))

    assert schedule(6, 20) == schedule(0.03, 0.1)
    assert schedule(6, 20) != schedule(7, 20)
    assert schedule(6, 20) != schedule(6, 21)


def test_the_whole_run_may_be_warmup() -> None:
    schedule = LearningRate(peak=1.0, shape="cosine", num_steps=5, warmup=5)
    assert rates(schedule) == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"shape": "linear", "warmup": 101},
            "101 steps of warm-up and 0 of decay do not fit a run of 100. Shorten them or give "
            "fractions",
        ),
        (
            {"shape": "wsd", "warmup": 60, "decay": 0.5},
            "60 steps of warm-up and 50 of decay do not fit a run of 100",
        ),
        ({"warmup": 1.0}, "warmup is 1.0; an integer means steps, a fraction of the run lies"),
        ({"shape": "wsd", "decay": -0.1}, "decay is -0.1; an integer means steps"),
        ({"warmup": -1}, "warmup is -1 steps; give 0 or more"),
        ({"peak": 0.0}, "the peak is 0.0; give one above 0"),
        ({"peak": math.nan}, "the peak is nan; give one above 0"),
        ({"final_fraction": 1.5}, "final_fraction is 1.5; give 0 to 1"),
    ],
)
def test_refuses_what_no_run_can_follow(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        LearningRate(**{"peak": 1e-5, "shape": "cosine", "num_steps": 100} | settings)  # type: ignore[arg-type]
    assert isinstance(caught.value, MegaTrainError)
    assert caught.value.exit_code == 2
