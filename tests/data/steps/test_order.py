"""Order: permutations by position, mixtures that keep their weights, seeking that costs nothing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.steps.order import MixedOrder, Order, ShuffledOrder
from megatrain.errors import ConfigError
from testkit.effort import require_effort


def _all(order: Order, epoch: int = 0) -> list[int]:
    rows: list[int] = order.rows(epoch, 0, order.size).tolist()
    return rows


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(_all(ShuffledOrder(size, seed), epoch)) == list(range(size))


@given(
    size=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    weighted=st.booleans(),
)
def test_an_order_is_the_same_however_it_is_cut(size: int, cuts: list[int], weighted: bool) -> None:
    order = MixedOrder([size, 7], [1.3, 0.5], 5) if weighted else ShuffledOrder(size, 5)
    points = [0, *sorted(min(cut, order.size) for cut in cuts), order.size]
    pieces = [order.rows(2, a, b) for a, b in pairwise(points)]
    assert np.concatenate(pieces).tolist() == _all(order, 2)


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = [
        tuple(_all(ShuffledOrder(50, seed), epoch)) for seed in range(10) for epoch in range(10)
    ]
    assert len(set(orders)) == 100


def test_a_run_repeats_in_another_process() -> None:
    """No hash of Python's own, which changes from process to process, may decide the order."""
    assert _all(ShuffledOrder(10, 42)) == [7, 9, 5, 3, 0, 8, 6, 4, 2, 1]
    assert MixedOrder([5, 5], [1, 0.4], 42).rows(3, 0, 7).tolist() == [8, 3, 6, 2, 0, 4, 1]


def test_places_are_spread_evenly() -> None:
    """Chi-squared of (row, place) over 4,000 permutations of 8: 49 degrees of freedom."""
    counts = np.zeros((8, 8))
    for seed in range(4000):
        counts[np.arange(8), _all(ShuffledOrder(8, seed))] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 110


def test_neighbors_do_not_stay_together() -> None:
    rows = np.array(_all(ShuffledOrder(10_000, 1)))
    assert (np.abs(np.diff(rows)) == 1).mean() < 0.002
    assert abs(np.corrcoef(np.arange(10_000), rows)[0, 1]) < 0.05


def test_the_millionth_of_a_millionth_is_found_at_once() -> None:
    size = 3 * 10**12

    def find() -> None:
        rows = ShuffledOrder(size, 1).rows(7, 10**12, 10**12 + 16)
        mixed = MixedOrder([size, size], [1, 2], 1).rows(7, 10**12, 10**12 + 16)
        assert len(set(rows.tolist())) == len(set(mixed.tolist())) == 16

    require_effort(find, at_most=0.2)


def test_sources_without_weights_are_concatenated_and_shuffled_as_one() -> None:
    """10,000 and 100 rows: each comes once, and the small source is spread over the epoch."""
    order = MixedOrder([10_000, 100], [1.0, 1.0], seed=9)
    for epoch in range(3):
        rows = _all(order, epoch)
        assert sorted(rows) == list(range(10_100))
        assert rows == _all(ShuffledOrder(10_100, 9), epoch)
        small = np.flatnonzero(np.array(rows) >= 10_000)
        assert small.min() < 1_000
        assert small.max() > 9_000


def _times(order: MixedOrder, sizes: list[int], epoch: int) -> list[list[int]]:
    """How often each row of each source comes in an epoch."""
    seen = Counter(_all(order, epoch))
    ends = np.cumsum([0, *sizes])
    return [[seen[row] for row in range(a, b)] for a, b in pairwise(ends.tolist())]


def test_a_weight_is_how_often_each_row_comes() -> None:
    sizes, order = [100, 40, 7], MixedOrder([100, 40, 7], [1, 2.5, 3], seed=9)
    assert order.counts == (100, 100, 21)
    assert order.size == 221
    for epoch in range(4):
        first, second, third = _times(order, sizes, epoch)
        assert set(first) == {1}
        assert Counter(second) == {2: 20, 3: 20}
        assert set(third) == {3}


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 4), min_size=4, max_size=4),
    epoch=st.integers(0, 10**6),
    shuffle=st.booleans(),
)
def test_in_every_epoch_rows_come_as_often_as_the_weight_allows(
    sizes: list[int], weights: list[float], epoch: int, shuffle: bool
) -> None:
    order = MixedOrder(sizes, weights[: len(sizes)], seed=2, shuffle=shuffle)
    for times, weight, count in zip(
        _times(order, sizes, epoch), weights, order.counts, strict=False
    ):
        assert {int(weight), int(weight) + 1} >= set(times)
        assert sum(times) == count


def test_a_fraction_takes_other_rows_in_each_epoch_until_all_have_come() -> None:
    order = MixedOrder([1000], [0.25], seed=9)
    parts = [set(_all(order, epoch)) for epoch in range(8)]
    assert [len(part) for part in parts] == [250] * 8
    assert set.union(*parts[:4]) == set.union(*parts[4:]) == set(range(1000))
    assert parts[0] != parts[4]


def test_a_fraction_does_not_follow_a_pattern_of_the_file() -> None:
    """Every other row, say, is of one kind: a half must hold both kinds."""
    rows = np.array(_all(MixedOrder([10_000], [0.5], seed=9)))
    assert 0.45 < (rows % 2).mean() < 0.55


def test_without_shuffling_rows_come_in_file_order() -> None:
    order = MixedOrder([3, 4], [2, 0.5], seed=1, shuffle=False)
    for epoch in range(3):
        rows = _all(order, epoch)
        assert rows[:6] == [0, 1, 2, 0, 1, 2]
        assert rows[6:] == sorted(set(rows[6:]))
        assert len(rows) == 8
    assert _all(MixedOrder([3, 4], [1, 1], seed=1)) != list(range(7))


@pytest.mark.parametrize(
    ("sizes", "weights", "text"),
    [
        ([3, 4], [1], "2 sources to mix, but 1 weights"),
        ([3], [-1], "must be positive"),
        ([3, 4], [1, 0], "must be positive"),
        ([3, 0], [1, 1], "source 1 has no rows"),
    ],
)
def test_weights_that_mean_nothing_are_refused(
    sizes: list[int], weights: list[float], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        MixedOrder(sizes, weights, 0)


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        ShuffledOrder(0, 1)
