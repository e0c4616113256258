"""Laws of resampling.py."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain.data.media.resampling import resampled

RATES = [(8000, 16_000), (44_100, 16_000), (48_000, 16_000), (22_050, 24_000), (16_000, 11_025)]


def _noise(num: int) -> NDArray[np.float32]:
    return np.random.default_rng(num).uniform(-1, 1, num).astype(np.float32)


@pytest.mark.parametrize(("rate", "wanted"), RATES)
@pytest.mark.parametrize("num", [1, 7, 4001])
def test_samples_are_those_of_scipy(rate: int, wanted: int, num: int) -> None:
    signal = pytest.importorskip("scipy.signal")
    common = np.gcd(rate, wanted)
    wide = _noise(num).astype(np.float64)
    expected = signal.resample_poly(wide, wanted // common, rate // common)
    found = resampled(_noise(num), rate, wanted)
    assert found.dtype == np.float32
    assert len(found) == len(expected)
    assert np.abs(found - expected).max() <= 1e-6


def _tone(pitch: float, rate: int) -> NDArray[np.float32]:
    return np.sin(2 * np.pi * pitch * np.arange(rate) / rate).astype(np.float32)


@pytest.mark.parametrize(("rate", "wanted"), RATES)
def test_a_tone_stays_the_tone_that_it_is(rate: int, wanted: int) -> None:
    """The sound ends where silence begins, so its first and last samples are not looked at."""
    pitch = 0.2 * min(rate, wanted)
    inside = slice(wanted // 10, -wanted // 10)
    found = resampled(_tone(pitch, rate), rate, wanted)[inside]
    assert np.abs(found - _tone(pitch, wanted)[inside]).max() < 2e-3
    other = _tone(1.01 * pitch, wanted)[inside]
    assert np.abs(found - other).max() > 0.1


def test_a_tone_that_the_new_rate_cannot_hold_is_gone() -> None:
    found = resampled(_tone(15_000, 48_000), 48_000, 16_000)
    assert np.abs(found[1000:-1000]).max() < 2e-3


def test_a_sound_of_the_same_rate_is_as_it_was() -> None:
    samples = _noise(50)
    assert resampled(samples, 16_000, 16_000) is samples
