"""The launcher's words are understood or refused; a rank ends with it, and knows its launch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import Any

import pytest
import torch.distributed as dist

from megatrain.errors import ConfigError
from megatrain.ranks.launcher import (
    LAUNCHER,
    VARIABLES,
    join_ranks,
    launch_name,
    read_environment,
)
from megatrain.ranks.meeting import LOOPBACK, serve
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import ALONE
from testkit.patience import HANG_S
from testkit.warm_python import warm_python

WHOLE = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment",
    [{}, {"MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}, WHOLE | {"WORLD_SIZE": "1"}],
)
def test_without_others_a_process_is_alone(environment: dict[str, str]) -> None:
    assert read_environment(environment) is None


def test_the_environment_says_who_we_are_and_where_ranks_meet() -> None:
    seat = read_environment(WHOLE)
    assert seat is not None
    assert (seat.owner, seat.address, seat.port, seat.agent) == (
        Owner(2, 4),
        "host-0",
        29500,
        False,
    )
    agent = read_environment(WHOLE | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None
    assert agent.agent


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": ""}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT set, RANK not"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE not"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT not"),
        ({"RANK": "4"}, "RANK is 4, WORLD_SIZE 4"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_environment(WHOLE | changes)


@pytest.mark.parametrize("size", [None, "1"])
def test_a_process_alone_makes_no_group(monkeypatch: pytest.MonkeyPatch, size: str | None) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert join_ranks("cpu", 1.0) is ALONE
    assert not dist.is_initialized()


ASKS = f"""
import os, time
from megatrain.ranks.launcher import end_with_launcher
end_with_launcher()
print(os.environ.get({LAUNCHER!r}), flush=True)
"""
STANDS_FOR_THE_LAUNCHER = f"""
import os
os.environ[{LAUNCHER!r}] = str(os.getppid())
{ASKS}
"""


def _asked(code: str, launcher: str | None) -> tuple[int, str]:
    environment = {**os.environ} if launcher is None else {**os.environ, LAUNCHER: launcher}
    done = subprocess.run(
        [*warm_python().command, "-c", code],
        stdout=subprocess.PIPE, text=True, env=environment, timeout=HANG_S, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.merge
def test_a_launcher_that_died_before_is_noticed() -> None:
    assert _asked(ASKS, "1") == (-signal.SIGTERM, "")


def test_a_process_whose_launcher_lives_goes_on_and_tells_its_children_of_none() -> None:
    assert _asked(STANDS_FOR_THE_LAUNCHER, None) == (0, "None\n")


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


def test_a_store_that_is_gone_or_silent_means_no_name() -> None:
    with socket.socket() as service:
        service.bind((LOOPBACK, 0))
        given = environment_of(service.getsockname()[1])
        assert launch_name(given, SHORT_S) is None
        service.listen()
        assert launch_name(given, SHORT_S) is None
