"""The cores of a host, divided among its ranks."""

from __future__ import annotations

import pytest

from megatrain.run.together.cores import Allowance, shares

EIGHT = tuple(range(8))
NODES = {0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3, 6, 7})}


def _places(*nodes: int | None) -> list[Allowance]:
    return [Allowance(cores=EIGHT, node=node) for node in nodes]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_ranks_have_all_cores_and_none_twice(count: int) -> None:
    found = shares(_places(*[None] * count), {})
    assert sorted(core for part in found for core in part) == list(EIGHT)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_a_rank_has_cores_near_its_device() -> None:
    assert shares(_places(0, 1, 1, 0), NODES) == [(0, 1), (2, 3), (6, 7), (4, 5)]
    assert shares(_places(0, 0), NODES) == [(0, 1), (4, 5)]


def test_an_unknown_node_means_an_even_share() -> None:
    assert shares(_places(0, None), NODES) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert shares(_places(0, 1), {0: NODES[0], 1: frozenset()}) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_more_ranks_than_cores_share_all() -> None:
    assert shares([Allowance(cores=(3,), node=None)] * 2, {}) == [(3,), (3,)]


def test_cores_that_were_divided_stay() -> None:
    places = [Allowance(cores=(0, 1, 2), node=None), Allowance(cores=(3,), node=None)]
    assert shares(places, {}) == [(0, 1, 2), (3,)]
