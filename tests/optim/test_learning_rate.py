"""Laws of the learning rate: closed forms at the ends, bounds, monotonicity, refusals."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments, get_scheduler

from megatrain.errors import ConfigError, MegaTrainError
from megatrain.optim.learning_rate import LRSchedule, Shape

SHAPES = get_args(Shape)


def rates(schedule: LRSchedule) -> list[float]:
    return [schedule.rate(step) for step in range(schedule.num_steps + 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_rises_from_zero_and_the_peak_follows_it(shape: Shape) -> None:
    schedule = LRSchedule(peak=3e-4, shape=shape, num_steps=100, warmup=10)
    assert [schedule.rate(step) for step in (0, 5, 10)] == [0.0, 3e-4 / 2, 3e-4]
    assert schedule.rate(9) == pytest.approx(3e-4 * 0.9, rel=1e-15)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_warmup_the_first_step_has_the_peak(shape: Shape) -> None:
    assert LRSchedule(peak=1e-5, shape=shape, num_steps=7).rate(0) == 1e-5


def test_closed_forms_of_the_decay() -> None:
    # 20 steps of warm-up, 80 after it; step 60 is half way, 99 the last of the run
    def at(shape: Shape, step: int) -> float:
        schedule = LRSchedule(
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
    schedule = LRSchedule(
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
    assert min(values[bool(rise) : num_steps], default=1.0) > 0
    assert not rise or rise[0] == 0
    assert min(rest) >= final_fraction - 1e-15


def test_steps_and_fraction_are_two_ways_to_say_the_same() -> None:
    def schedule(warmup: float, decay: float) -> list[float]:
        return rates(LRSchedule(peak=1.0, shape="wsd", num_steps=200, warmup=warmup, decay=decay))

    assert schedule(6, 20) == schedule(0.03, 0.1)
    assert schedule(6, 20) != schedule(7, 20)
    assert schedule(6, 20) != schedule(6, 21)


def test_the_whole_run_may_be_warmup() -> None:
    schedule = LRSchedule(peak=1.0, shape="cosine", num_steps=5, warmup=5)
    assert rates(schedule) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("warmup", [0.03, 0.5, 0.99])
def test_a_fraction_never_gives_every_step_a_rate_of_zero(warmup: float) -> None:
    """Rounded up it would be the whole of a run of one step."""
    assert LRSchedule(peak=1.0, shape="cosine", num_steps=1, warmup=warmup).rate(0) == 1.0
    two = LRSchedule(peak=1.0, shape="cosine", num_steps=2, warmup=warmup)
    assert [two.rate(0), two.rate(1)] == [0.0, 1.0]


THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "constant": ("constant_with_warmup", {}),
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "wsd": ("warmup_stable_decay", {"decay_type": "linear"}),
}


def theirs(shape: Shape, peak: float, warmup: int, num_steps: int, decay: int) -> list[float]:
    """The rate of each step of a run with transformers' scheduler."""
    name, options = THEIRS[shape]
    if shape == "wsd":
        options = {**options, "num_decay_steps": decay}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(name, optimizer, warmup, num_steps, options)
    found = []
    for _ in range(num_steps):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 20, 101])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rate_is_the_one_of_transformers(shape: Shape, num_steps: int) -> None:
    for warmup in {0, 1, 2, num_steps // 3, num_steps - 1} & set(range(num_steps)):
        for decay in {0, 1, (num_steps - warmup) // 2}:
            ours = LRSchedule(
                peak=3e-5, shape=shape, num_steps=num_steps, warmup=warmup, decay=decay
            )
            expected = theirs(shape, 3e-5, warmup, num_steps, decay)
            assert rates(ours)[:num_steps] == expected, (warmup, decay)


@given(num_steps=st.integers(2, 400), ratio=st.floats(0, 0.99))
def test_a_fraction_of_warmup_is_rounded_as_transformers_does(num_steps: int, ratio: float) -> None:
    settings = SimpleNamespace(warmup_steps=ratio)  # the whole would need accelerate
    expected = TrainingArguments.get_warmup_steps(settings, num_steps)
    ours = LRSchedule(peak=1.0, shape="linear", num_steps=num_steps, warmup=ratio)
    assert ours.warmup_steps == min(expected, num_steps - 1)


def test_a_floor_is_that_of_cosine_with_min_lr() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    options = {"min_lr_rate": 0.1}
    scheduler = get_scheduler("cosine_with_min_lr", optimizer, 3, 30, options)
    ours = LRSchedule(peak=2e-5, shape="cosine", num_steps=30, warmup=3, final_fraction=0.1)
    for step in range(30):
        assert ours.rate(step) == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()


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
        ({"num_steps": 1, "warmup": 1}, "nothing would be trained. Set optim.warmup to 0"),
        ({"warmup": 1.0}, "warmup is 1.0; give a number of steps, or a fraction of the run"),
        ({"shape": "wsd", "decay": -0.1}, "decay is -0.1; give a number of steps"),
        ({"warmup": -1}, "warmup is -1 steps; give 0 or more"),
        ({"peak": 0.0}, "the peak is 0.0; give one above 0"),
        ({"peak": math.nan}, "the peak is nan; give one above 0"),
        ({"final_fraction": 1.5}, "final_fraction is 1.5; give 0 to 1"),
    ],
)
def test_refuses_what_no_run_can_follow(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        LRSchedule(**{"peak": 1e-5, "shape": "cosine", "num_steps": 100} | settings)  # type: ignore[arg-type]
    assert isinstance(caught.value, MegaTrainError)
    assert caught.value.exit_code == 2
