"""Ranks find each other, or each says who came. Ranks are threads here: each has its own store."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatrain.errors import ConfigError, RankLost
from megatrain.ranks.environment import Seat
from megatrain.ranks.meeting import meet
from megatrain.ranks.ownership import Owner

LONG_S = 120.0


@pytest.fixture
def agent() -> Any:
    """A store that outlives the ranks, as that of torchrun's agent."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LONG_S)
    )


def seat(rank: int, size: int, port: int, *, agent: bool = True) -> Seat:
    return Seat(owner=Owner(rank, size), address="127.0.0.1", port=port, agent=agent)


def met(seats: Sequence[Seat], deadline_s: float) -> list[Any]:
    """Meet at once; return the name of each one's attempt, or its error."""

    def one(seat: Seat) -> object:
        try:
            store, hosts = meet(seat, deadline_s)
        except (ConfigError, RankLost) as error:
            return error
        assert hosts == [socket.gethostname()] * seat.owner.size
        store.set(f"from {seat.owner.rank}", "")
        store.wait([f"from {rank}" for rank in range(seat.owner.size)])
        return store

    with ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(one, seats))


def test_ranks_meet_and_later_attempts_hear_nothing_of_earlier_ones(agent: Any) -> None:
    for attempt in range(3):
        stores = met([seat(rank, 3, agent.port) for rank in range(3)], LONG_S)
        assert all(not store.check(["left"]) for store in stores), stores
        stores[0].set("left", str(attempt))
        assert all(store.check(["left"]) for store in stores)


def test_a_rank_that_trusted_an_earlier_attempt_would_join_nobody(agent: Any) -> None:
    """The sibling: what an attempt left is there to be taken for the next one's."""
    met([seat(rank, 2, agent.port) for rank in range(2)], LONG_S)
    name = agent.get("attempt").decode()
    word, _ = dict(json.loads(agent.get(f"{name}/roster")))[1]
    (found,) = met([seat(1, 2, agent.port)], 0.2)  # rank 0 does not come again
    assert isinstance(found, RankLost)
    assert json.loads(agent.get(f"{name}/here/1"))[0] != word


def test_who_did_not_come_is_named_with_who_came(agent: Any) -> None:
    first, second = met([seat(0, 4, agent.port), seat(2, 4, agent.port)], 1.0)
    for error in (first, second):
        assert isinstance(error, RankLost)
        host = socket.gethostname()
        assert "2 of 4 ranks did not come: 1, 3" in str(error)
        assert f"Came: rank 0 on {host}, rank 2 on {host}" in str(error)


def test_the_store_of_rank_0_needs_a_free_port_and_others_need_its_answer(agent: Any) -> None:
    (error,) = met([seat(0, 2, agent.port, agent=False)], 1.0)
    assert isinstance(error, ConfigError)
    assert f"rank 0 of 2 on {socket.gethostname()} cannot listen on port {agent.port}" in str(error)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        (error,) = met([seat(1, 2, port, agent=False)], 0.5)
        assert isinstance(error, RankLost)
        assert f"no answer from 127.0.0.1:{port} within 0.5 s" in str(error)
    stores = met([seat(rank, 2, port, agent=False) for rank in range(2)], LONG_S)
    assert not [store for store in stores if isinstance(store, Exception)]
