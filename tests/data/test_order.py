"""Order: permutations by position, mixtures that keep their weights, seeking that costs nothing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.order import InOrder, Mixed, Order, Permutation, Shuffled
from megatrain.errors import ConfigError
from tests.effort import require_effort


def _all(order: Order, epoch: int = 0) -> list[int]:
    rows: list[int] = order.rows(epoch, 0, order.size).tolist()
    return rows


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(_all(Shuffled(size, seed), epoch)) == list(range(size))


def test_a_position_that_repeats_would_be_noticed() -> None:
    rows = _all(Shuffled(100, 0))
    rows[3] = rows[4]
    assert sorted(rows) != list(range(100))


@given(
    size=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    weighted=st.booleans(),
)
def test_an_order_is_the_same_however_it_is_cut(size: int, cuts: list[int], weighted: bool) -> None:
    order = Mixed([size, 7], [3, 1], 5) if weighted else Shuffled(size, 5)
    points = [0, *sorted(min(cut, order.size) for cut in cuts), order.size]
    pieces = [order.rows(2, a, b) for a, b in pairwise(points)]
    assert np.concatenate(pieces).tolist() == _all(order, 2)


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = [tuple(_all(Shuffled(50, seed), epoch)) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == 100


def test_a_run_repeats_in_another_process() -> None:
    """No hash of Python's own, which changes from process to process, may decide the order."""
    assert _all(Shuffled(10, 42)) == [7, 9, 5, 3, 0, 8, 6, 4, 2, 1]
    assert Mixed([5, 5], [1, 1], 42).rows(0, 0, 8).tolist() == [0, 3, 4, 5, 7, 8, 5, 9]


def test_places_are_spread_evenly() -> None:
    """Chi-squared of (row, place) over 4,000 permutations of 8: 49 degrees of freedom."""
    counts = np.zeros((8, 8))
    for seed in range(4000):
        counts[np.arange(8), _all(Shuffled(8, seed))] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 110


def test_neighbours_do_not_stay_together() -> None:
    rows = np.array(_all(Shuffled(10_000, 1)))
    assert (np.abs(np.diff(rows)) == 1).mean() < 0.002
    assert abs(np.corrcoef(np.arange(10_000), rows)[0, 1]) < 0.05


def test_the_millionth_of_a_millionth_is_found_at_once() -> None:
    size = 3 * 10**12

    def find() -> None:
        rows = Shuffled(size, 1).rows(7, 10**12, 10**12 + 16)
        mixed = Mixed([size, size], [1, 2], 1).rows(7, 10**12, 10**12 + 16)
        assert len(set(rows.tolist())) == len(set(mixed.tolist())) == 16

    require_effort(find, at_most=0.2)


def test_going_there_and_back_is_one_to_one_far_out() -> None:
    size = 10**12 + 39
    here = np.arange(size - 2000, size, dtype=np.int64)
    there = Permutation(size, 3)(here)
    assert len(np.unique(there)) == 2000
    assert 0 <= there.min() <= there.max() < size


def test_a_mixture_keeps_its_weights_in_every_block() -> None:
    order = Mixed([400, 5000, 100], [0.5, 0.3, 0.2], seed=9)
    for start in range(0, 5000, 1000):
        rows = order.rows(0, start, start + 1000)
        parts = Counter(np.searchsorted([400, 5400], rows, side="right").tolist())
        assert parts == {0: 500, 1: 300, 2: 200}


def test_a_part_is_used_up_before_it_repeats() -> None:
    order = Mixed([400, 5000, 100], [0.5, 0.3, 0.2], seed=9)
    seen: Counter[int] = Counter()
    for start in range(0, 5000, 1000):
        seen.update(order.rows(0, start, start + 1000).tolist())
        for first, last in ((0, 400), (400, 5400), (5400, 5500)):
            counts = [seen[row] for row in range(first, last)]
            assert max(counts) - min(counts) <= 1


def test_a_mixture_goes_on_in_the_next_epoch() -> None:
    order = Mixed([30, 70], [1, 1], seed=9)
    both = Counter([*_all(order, 0), *_all(order, 1)])
    assert _all(order, 0) != _all(order, 1)
    assert sum(both[row] for row in range(30)) > 80


def test_evaluation_keeps_the_order_of_the_file() -> None:
    assert _all(InOrder(5), 3) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sizes", "weights", "text"),
    [
        ([3, 4], [1], "2 parts to mix, but 1 weights"),
        ([3], [-1], "must be positive"),
        ([3, 4], [0, 0], "must be positive"),
        ([3, 4], [1, 1e-6], "below 1/1000"),
        ([3, 0], [1, 1], "part 1 has no rows"),
    ],
)
def test_weights_that_mean_nothing_are_refused(
    sizes: list[int], weights: list[float], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Mixed(sizes, weights, 0)


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        Shuffled(0, 1)
