"""Laws of the random bits: functions of seed, update and element, and as good as coins.

Statistics are of fixed seeds, so that they come out the same each time. Limits are five standard
deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatrain.optim.rounding import Rounding
from megatrain.optim.states import SHARED

N = 1 << 20


def halves(rounding: Rounding, n: int = N) -> tuple[Tensor, Tensor]:
    """The lower and the upper 16 bits, as numbers from 0 to 1 in double precision."""
    bits = rounding.bits(0, n)
    low, high = bits & 0xFFFF, (bits >> 16) & 0xFFFF
    return (low.double() + 0.5) / 65536, (high.double() + 0.5) / 65536


def correlation(a: Tensor, b: Tensor) -> float:
    return float(((a - 0.5) * (b - 0.5)).mean() * 12)


def is_uncorrelated(a: Tensor, b: Tensor) -> bool:
    return abs(correlation(a, b)) < 5 / math.sqrt(a.numel())


def test_the_first_bits_are_these() -> None:
    """A changed generator would change the results of every run that is resumed."""
    bits = Rounding(seed=1, update=2, first=3 * SHARED).bits(0, 4)
    assert [f"{x & 0xFFFFFFFF:08x}" for x in bits.tolist()] == [
        "be9c6334",
        "41912fb7",
        "64052eff",
        "9dfa53b6",
    ]


def test_an_element_has_its_bits_wherever_a_run_begins_or_ends() -> None:
    whole = Rounding(seed=5, update=9, first=7 * SHARED).bits(0, 20 * SHARED)
    for begin, end in (
        (0, 1),
        (SHARED, 3 * SHARED),
        (19 * SHARED, 20 * SHARED),
        (SHARED, SHARED + 77),
    ):
        run = Rounding(seed=5, update=9, first=7 * SHARED + begin)
        assert torch.equal(run.bits(0, end - begin), whole[begin:end])
        whole_run = Rounding(seed=5, update=9, first=7 * SHARED)
        assert torch.equal(whole_run.bits(begin, end), whole[begin:end])


def test_a_run_that_starts_inside_a_block_is_refused() -> None:
    with pytest.raises(AssertionError):
        Rounding(seed=0, update=1, first=SHARED // 2)


@pytest.mark.parametrize("seed", [0, 1, -3, 2**80 + 17])
def test_bits_are_uniform(seed: int) -> None:
    for half in halves(Rounding(seed=seed, update=1, first=0)):
        assert abs(float(half.mean()) - 0.5) < 5 / math.sqrt(12 * N)
        assert abs(float(half.var()) - 1 / 12) < 5 / math.sqrt(180 * N)
        counts = torch.bincount((half * 256).long(), minlength=256).double()
        chi_squared = float(((counts - N / 256) ** 2 / (N / 256)).sum())
        assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


Pair = Callable[[Rounding], tuple[Tensor, Tensor]]


def other(**changes: int) -> Pair:
    def pair(rounding: Rounding) -> tuple[Tensor, Tensor]:
        fields = {"seed": rounding.seed, "update": rounding.update, "first": rounding.first}
        changed = Rounding(**{name: fields[name] + changes.get(name, 0) for name in fields})
        return halves(rounding)[0], halves(changed)[0]

    return pair


def shifted(places: int) -> Pair:
    return lambda rounding: (
        halves(rounding)[0][places:],
        halves(rounding)[0][:-places],
    )


@pytest.mark.parametrize(
    "pair",
    [
        halves,
        *[shifted(places) for places in (1, 2, 3, 4, 8, 16, 64, 128, SHARED)],
        *[other(update=number) for number in (1, 2, 16)],
        *[other(seed=number) for number in (1, 2, 1 << 32)],
        other(first=N),
        other(update=1, first=SHARED),
        other(seed=1, update=-1),
    ],
)
def test_no_two_draws_are_correlated(pair: Pair) -> None:
    for update in (1, 1000):
        assert is_uncorrelated(*pair(Rounding(seed=42, update=update, first=0)))


def test_the_places_of_a_block_are_as_good_as_blocks() -> None:
    """For each place, over blocks: a mean of one half, and no correlation with the next place."""
    low, high = (half.view(-1, SHARED) for half in halves(Rounding(seed=7, update=3, first=0)))
    num_blocks = low.shape[0]
    for half in (low, high):
        means = (half.mean(0) - 0.5) * math.sqrt(12 * num_blocks)
        assert float(means.abs().max()) < 5
        assert 0.7 < float(means.var()) < 1.4
        neighbors = ((half[:, 1:] - 0.5) * (half[:, :-1] - 0.5)).mean(0) * 12
        assert float(neighbors.abs().max()) * math.sqrt(num_blocks) < 5
