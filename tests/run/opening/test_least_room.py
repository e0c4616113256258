"""Ranks plan with the memory of the host that has least."""

from __future__ import annotations

import threading

import pytest

from megatrain.planning.ranks.division import SOLE_RANK, Division
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.opening.planned import Room, division_of, least_room
from testkit.rank_threads import Together


def _room(free: int, held: int, device: int = 7, disk: int = 9) -> Room:
    return Room(free_bytes=free, held_bytes=held, device_bytes=device, disk_bytes=disk)


def test_all_plan_with_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: "aab"[here.rank])
    own = [_room(100, 10, device=5), _room(98, 20), _room(90, 30, disk=8)]

    def work(ranks: Ranks) -> Room:
        here.rank = ranks.owner.rank
        return least_room(ranks, own[ranks.owner.rank])

    # Host a has 98 free and 30 that its ranks hold, host b 90 and 30.
    assert Together(3).run(work) == [_room(90, 30, device=5, disk=8)] * 3


def test_a_process_alone_has_what_it_sees() -> None:
    assert least_room(ALONE, _room(1, 2)) == _room(1, 2)


def test_ranks_are_counted_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: "aab"[here.rank])

    def work(ranks: Ranks) -> Division:
        here.rank = ranks.owner.rank
        return division_of(ranks)

    found = Together(3).run(work)
    assert found == [Division(num_hosts=2, per_host=2, missing=1)] * 3
    assert found[0].size == 3
    assert division_of(ALONE) == SOLE_RANK
