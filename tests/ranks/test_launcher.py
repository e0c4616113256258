"""The launcher's words are understood or refused; a rank ends with it, and knows its launch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from megatrain.errors import ConfigError, RankLost
from megatrain.ranks.launcher import (
    LAUNCHER,
    VARIABLES,
    _meet,
    init_distributed,
    launch_name,
    read_environment,
)
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


def test_the_environment_says_who_we_are() -> None:
    assert read_environment(WHOLE) == Owner(2, 4)


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
    assert init_distributed("cpu", 1.0) is ALONE
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


def attempt(launch: str, number: int) -> dict[str, str]:
    """What torch's agent says to a rank of an attempt, as far as its launch is meant."""
    return {
        "TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_x/{launch}/attempt_{number}/0/error.json",
        "TORCHELASTIC_RESTART_COUNT": str(number),
    }


def test_attempts_have_one_name_and_launches_with_one_id_have_two() -> None:
    names = [
        [launch_name(attempt(launch, number)) for number in range(2)] for launch in ("1_a", "1_b")
    ]
    assert names[0][0] == names[0][1] is not None
    assert names[1][0] == names[1][1] is not None
    assert names[0] != names[1]
    assert launch_name({}) is None


@pytest.fixture
def connect() -> Callable[[], Any]:
    """Return what connects to the store of an agent."""
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    server = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: store("127.0.0.1", server.port, wait_for_workers=False)


def met(connect: Callable[[], Any], size: int, late_s: float = 0.0) -> set[str]:
    """Return the names that all ranks of an attempt have for it; rank 0 comes last."""

    def come(rank: int) -> str:
        time.sleep(0 if rank else late_s)
        return _meet(connect(), Owner(rank, size), HANG_S)

    with ThreadPoolExecutor(size) as pool:
        return set(pool.map(come, range(size)))


def test_each_attempt_has_a_name_of_its_own_whatever_is_in_the_store(
    connect: Callable[[], Any],
) -> None:
    first, second = met(connect, 3), met(connect, 3, late_s=0.5)
    assert len(first) == len(second) == 1
    assert first != second


def test_ranks_that_do_not_come_are_named(connect: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(_meet, connect(), Owner(rank, 4), 0.5) for rank in (0, 2)]
    for rank in ranks:
        with pytest.raises(TimeoutError, match=r"rank 1, 3 did not come; rank 0 on .*, rank 2 on"):
            rank.result()


LOSES_A_RANK = """
import sys, threading
import megatrain.__main__ as program
from megatrain.errors import {error}

def run():
    threading.Thread(target=threading.Event().wait).start()
    raise {error}("rank 1 is gone")

program._run = run
program.main()
"""


@pytest.mark.parametrize(("error", "ends"), [("RankLost", True), ("DiskFull", False)])
def test_a_process_that_lost_a_rank_ends_whatever_its_threads_wait_for(
    error: str, ends: bool
) -> None:
    """Another error waits for the threads: so it is not their end that is seen."""
    command = [*warm_python().command, "-c", LOSES_A_RANK.format(error=error)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(error)
        if ends:
            assert process.wait(HANG_S) == RankLost.exit_code
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
        process.kill()


def test_a_rank_ends_if_something_else_has_the_port() -> None:
    join = "from megatrain.ranks.launcher import init_distributed; init_distributed('cpu', 0.3)"
    with socket.create_server(("127.0.0.1", 0)) as service:
        port = str(service.getsockname()[1])
        given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            [*warm_python().command, "-c", join], env=os.environ | given, timeout=HANG_S,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == RankLost.exit_code, done.stderr
    assert f"127.0.0.1:{port} accepts connections and does not answer" in done.stderr
