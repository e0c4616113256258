"""Ranks find each other, or each says who came. Ranks are threads here: each has its own store."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatrain.errors import ConfigError, RankLost
from megatrain.ranks.meeting import is_loopback, meet, serve
from megatrain.ranks.ownership import Owner, Seat
from testkit.patience import HANG_S, eventually
from testkit.strangers import listeners
from testkit.warm_python import warm_python

LONG_S = 120.0
SHORT_S = 0.2
JOINS = """
import sys
from megatrain.errors import MegaTrainError
from megatrain.ranks.launcher import join_ranks
try:
    join_ranks("cpu", float(sys.argv[1]))
except MegaTrainError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def agent() -> Any:
    """A store that outlives the ranks, as that of torchrun's agent."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LONG_S)
    )


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where every connection is accepted, and nothing is said until the test is over."""
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen()  # the system accepts
        yield service.getsockname()[1]


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
    host = socket.gethostname()
    assert f"rank 0 of 2 on {host} cannot listen on port {agent.port} of 127.0.0.1" in str(error)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        (error,) = met([seat(1, 2, port, agent=False)], 0.5)
        assert isinstance(error, RankLost)
        assert f"no answer from 127.0.0.1:{port} within 0." in str(error)
    stores = met([seat(rank, 2, port, agent=False) for rank in range(2)], LONG_S)
    assert not [store for store in stores if isinstance(store, Exception)]


def test_a_service_that_says_nothing_is_named_by_every_rank(silent_port: int) -> None:
    for rank in range(3):  # each is a process, and hangs up what it has dialed
        (error,) = met([seat(rank, 3, silent_port)], SHORT_S)
        assert isinstance(error, RankLost)
        assert f"127.0.0.1:{silent_port} accepts connections and has not answered" in str(error)
    assert eventually(lambda: "meeting" not in _thread_names()), "none stays behind"


def _thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_the_client_of_torch_alone_would_wait_for_it_longer(silent_port: int) -> None:
    """The sibling: it still waits after five deadlines, also when a rank has given up."""

    def connect() -> None:
        with suppress(RuntimeError):
            dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", silent_port, timeout=timedelta(seconds=SHORT_S)
            )

    bare = threading.Thread(target=connect, daemon=True)
    bare.start()
    bare.join(5 * SHORT_S)
    assert bare.is_alive()
    met([seat(1, 2, silent_port)], SHORT_S)
    assert bare.is_alive()  # and a rank hangs up none of the connections that others made


def test_a_process_ends_with_the_code_of_a_lost_rank(silent_port: int) -> None:
    for rank, agent, code in [("0", "False", 2), ("0", "True", 6), ("1", "False", 6)]:
        done = subprocess.run(
            [*warm_python().command, "-c", JOINS, str(SHORT_S)],
            capture_output=True, text=True, timeout=HANG_S, check=False,
            env={**os.environ, "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(silent_port), "TORCHELASTIC_USE_AGENT_STORE": agent},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert f"{silent_port}" in done.stdout
        assert "127.0.0.1" in done.stdout


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("localhost", True),
        ("10.0.0.1", False), ("0.0.0.0", False), ("host-0", False), (socket.gethostname(), False),
    ],
)  # fmt: skip
def test_only_an_address_that_is_written_as_one_is_the_loopback(
    address: str, expected: bool
) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_store_on_the_loopback_listens_nowhere_else(address: str) -> None:
    store: Any = serve(address, 0, LONG_S)
    assert ("127.0.0.1", store.port) in listeners(os.getpid())
    assert {host for host, port in listeners(os.getpid()) if port == store.port} == {"127.0.0.1"}
    (found,) = met([seat(0, 1, store.port)], LONG_S)
    assert not isinstance(found, Exception)


def test_a_store_as_torch_makes_it_would_be_seen_on_all_interfaces(agent: Any) -> None:
    """The sibling: the walk over sockets sees more than the loopback."""
    assert {host for host, port in listeners(os.getpid()) if port == agent.port} != {"127.0.0.1"}
