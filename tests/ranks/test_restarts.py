"""A launch has a name of its own, which all its attempts know."""

from __future__ import annotations

import socket
from typing import Any

from megatrain.ranks.meeting import LOOPBACK, serve
from megatrain.ranks.restarts import launch_name

SHORT_S = 0.2


def environment_of(port: int) -> dict[str, str]:
    """What torchrun says to a rank, as far as its store is meant."""
    return {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "1",
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port),
    }  # fmt: skip


def test_attempts_have_one_name_and_launches_with_one_id_have_two() -> None:
    stores: list[Any] = [serve(LOOPBACK, 0, 60.0) for _ in range(2)]
    names = [[launch_name(environment_of(store.port)) for _ in range(2)] for store in stores]
    assert names[0][0] == names[0][1] is not None
    assert names[1][0] == names[1][1] is not None
    assert names[0] != names[1]


def test_without_a_store_of_the_launcher_there_is_no_name() -> None:
    given = environment_of(1)
    assert launch_name({}) is None
    assert launch_name(given | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    assert launch_name(given | {"MASTER_PORT": ""}) is None


def test_a_store_that_is_gone_or_silent_means_no_name() -> None:
    with socket.socket() as service:
        service.bind((LOOPBACK, 0))
        given = environment_of(service.getsockname()[1])
        assert launch_name(given, SHORT_S) is None
        service.listen()
        assert launch_name(given, SHORT_S) is None
