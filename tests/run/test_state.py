"""Laws of run_state.py."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.run.state import RunState

LOSS = st.floats(allow_nan=False, allow_infinity=False)
NAMES = ("loss", "gradient norm")


@given(
    st.integers(0, 10**9), st.none() | LOSS, st.dictionaries(st.integers(0, 99), st.text()),
    st.dictionaries(st.text(), st.lists(LOSS, max_size=70)),
)  # fmt: skip
@settings(max_examples=100)
def test_a_state_comes_back_in_every_bit(
    step: int, loss: float | None, left_out: dict[int, str], recent: dict[str, list[float]]
) -> None:
    state = RunState(global_step=step, first_loss=loss, left_out=left_out)
    state.evaluations.best_loss = loss
    state.recent = {name: deque(values, maxlen=64) for name, values in recent.items()}
    again = RunState.from_json(json.loads(json.dumps(state.to_json())))
    assert again == state
    assert repr(again) == repr(state)  # also the sign of zero


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_step", -1), ("global_step", 1.0), ("global_step", "1"),
        ("total_tokens", True), ("first_loss", "x"),
        ("last_loss", 1), ("left_out", []), ("left_out", {"x": ""}), ("recent", {"loss": ["x"]}),
        ("recent", {"loss": 1}),
    ],
)  # fmt: skip
def test_what_no_run_has_said_is_refused(name: str, value: Any) -> None:
    fields = RunState(global_step=3).to_json() | {name: value}
    with pytest.raises((TypeError, ValueError, AttributeError)):
        RunState.from_json(fields)


def _noise(draw: random.Random, heavy: bool) -> float:
    """Return a number of mean 0 and variance 1; heavy: Student's t of 4 degrees of freedom."""
    value = draw.gauss(0, 1)
    return value / math.sqrt(draw.gammavariate(2, 1)) if heavy else value


def _shares(heavy: bool, num_runs: int = 40, num_steps: int = 500) -> dict[str, float]:
    """Return which share of spikes is found, and which of usual values is said to be one.

    Losses fall as a power law from up to 11, fast or slowly, with noise of 1 to 10 %; norms fall
    with warm-up, with noise of 10 to 35 %. A spike is at least half as much again (a norm: three
    times as much) and seven spreads of the noise above the curve.
    """
    counts: dict[str, list[int]] = {}
    for seed in range(num_runs):
        draw = random.Random(seed)
        start, floor = draw.uniform(2, 11), draw.uniform(0.3, 2.2)
        power, knee = draw.choice([0.3, 0.5, 1.0]), draw.choice([3, 10, 40, 150])
        warmup = draw.choice([1, 20, 100])
        spreads = draw.choice([0.01, 0.03, 0.06, 0.1]), draw.choice([0.1, 0.2, 0.35])
        state = RunState()
        for step in range(num_steps):
            means = (
                floor + (start - floor) * (1 + step / knee) ** -power,
                1 + 4 * math.exp(-step / warmup),
            )
            for name, mean, spread, least in zip(NAMES, means, spreads, (1.5, 3.0), strict=True):
                value = mean * math.exp(spread * _noise(draw, heavy))
                spikes = step >= 16 and draw.random() < 0.02
                if spikes:
                    value *= max(least, math.exp(7 * spread)) * draw.uniform(1, 3)
                said = state.judge(name, value) is not None
                count = counts.setdefault(f"{name}, {'found' if spikes else 'false'}", [0, 0])
                count[0], count[1] = count[0] + said, count[1] + 1
    return {name: said / num for name, (said, num) in counts.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("heavy", [False, True])
def test_spikes_are_found_and_nothing_else(heavy: bool) -> None:
    shares = _shares(heavy)
    for name in NAMES:
        assert shares[f"{name}, found"] >= 0.99, shares
        assert shares[f"{name}, false"] < 0.01, shares


def test_what_is_constant_or_zero_is_no_spike() -> None:
    state = RunState()
    assert [state.judge("loss", 2.0) for _ in range(100)] == [None] * 100
    assert state.judge("loss", 2.5) is None
    assert state.judge("loss", 4.0) == "loss 4, expected 2"
    assert [state.judge("norm", 0.0) for _ in range(100)] == [None] * 100


def test_a_level_that_stays_is_no_spike_for_long() -> None:
    state = RunState()
    draw = random.Random(0)
    for _ in range(64):
        state.judge("loss", draw.uniform(0.98, 1.02))
    said = [state.judge("loss", draw.uniform(2.9, 3.1)) is not None for _ in range(64)]
    assert said[0]
    assert 1 <= sum(said) <= 16
    assert not any(said[16:])
