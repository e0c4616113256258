"""Processes train to the bits of threads: what the wire does to a step is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from megatrain.ranks.ranks import Ranks, Wire
from testkit.rank_processes import run_ranks
from testkit.rank_training import Found, RankCase, differing, joined, ranks_of, trained_by

CASE = RankCase(size=2, evaluates=True)


class Careless:
    """Fits megatrain.ranks.ranks.Wire: one element of a gradient arrives in another's place."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.gather = wire.gather

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        self._wire.exchange(received, sent, num_received, num_sent)
        received[:2] = received[:2].flip(0)


def trained(ranks: Ranks) -> Found:
    return trained_by(ranks, CASE, CASE.model())


def trained_carelessly(ranks: Any) -> Found:
    ranks.wire = Careless(ranks.wire)
    return trained(ranks)


@pytest.mark.merge
def test_processes_train_to_the_bits_of_threads() -> None:
    threads, processes = ranks_of(CASE), run_ranks(2, trained)
    assert differing(joined(processes), joined(threads)) == []
    for one, other in zip(processes, threads, strict=True):
        assert (one.results, one.evaluated) == (other.results, other.evaluated)
    careless = joined(run_ranks(2, trained_carelessly))
    assert differing(careless, joined(threads)) != [], "the sibling: one swap shows"
