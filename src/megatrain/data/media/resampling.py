"""Sound at another rate: a low-pass filter, evaluated where the new samples are.

The ratio of rates is exact, as a fraction up / down in lowest terms. The filter is a sinc whose
cutoff is half of the lower rate, ten zeros to each side, under a Kaiser window with beta 5; sounds
are silent before their beginning and after their end. This is the definition of
`scipy.signal.resample_poly`. One of every `up` taps meets a sample, so a new sample costs about
twenty products, or twenty times as many as rates are apart where it becomes lower.

Laws (tests/data/media/test_resampling.py)
    1. Samples are those of scipy, within rounding to fp32.
    2. A tone below half of both rates stays the same tone; one above half of the new rate is gone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ZEROS = 10
"""Zeros of the sinc to each side."""
_BETA = 5.0


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Return a sound of `rate` samples a second with `wanted` ones."""
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    if up == down:
        return samples
    taps, half = _taps(up, down)
    num = -(-len(samples) * up // down)
    count = -(-num // up)  # periods: the same taps, `down` samples further on
    most = -(-len(taps) // up)
    last = ((up - 1) * down + half) // up + (count - 1) * down
    padded = np.pad(samples, (most, max(0, last + 1 - len(samples))))
    found = np.zeros((count, up), dtype=np.float32)
    for phase in range(min(up, num)):
        newest, first = divmod(phase * down + half, up)
        total = np.zeros(count)
        for back, tap in enumerate(taps[first::up]):
            begin = most + newest - back
            total += tap * padded[begin : begin + (count - 1) * down + 1 : down]
        found[:, phase] = total
    return found.reshape(-1)[:num]


def _taps(up: int, down: int) -> tuple[NDArray[np.float64], int]:
    """Return the filter at `up` times the rate, whose sum is `up`, and the place of its middle."""
    widest = max(up, down)
    half = _ZEROS * widest
    places = np.arange(-half, half + 1)
    taps = np.sinc(places / widest) * np.kaiser(2 * half + 1, _BETA)
    return up * taps / taps.sum(), half
