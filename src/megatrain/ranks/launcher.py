"""The launcher of this process: who this rank is, how it joins the others, when it ends.

    WORLD_SIZE not set, or 1           a process alone
    RANK, WORLD_SIZE, MASTER_ADDR,     one of several: torchrun sets them, or whatever starts the
    MASTER_PORT                        same command on several hosts
    LOCAL_RANK                         which of the processes of its host: the number of its GPU

`megatrain train --gpus` also puts its process id into the environment, and a rank ends when that
process does. On Linux the rank asks the system for SIGTERM at the launcher's death. The launcher
may have died before that, while this process was starting: then the parent is another one, and the
rank sends the signal to itself. Elsewhere a rank that has joined ends because the store is gone
(megatrain/ranks/watch.py).

Attempts of one launch share a random name. The id that a user gives torchrun may be that of another
launch (`--rdzv-id 1`, or none at all), so the first rank 0 leaves the name in the store of the
launcher, which outlives its ranks and ends with the launcher. Ranks of a launcher without such a
store have no name.

Laws (tests/ranks/test_launcher.py)
    1. An environment that is half set, or says what cannot be, is refused by name.
    2. A process alone makes no store and no group.
    3. A process whose launcher dies, or was dead before it asked, gets SIGTERM. Processes that it
       starts itself are told of no launcher.
    4. All attempts of one launch have the same name, and no other launch has it. A store that is
       gone or silent means no name, within a few seconds.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from megatrain.errors import ConfigError, RankLost, listing
from megatrain.ranks.ownership import SOLE, Owner, Seat
from megatrain.ranks.ranks import ALONE, Ranks

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER = "MEGATRAIN_LAUNCHER"
"""The variable with the process id of `megatrain train --gpus`."""
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_LAUNCH_KEY = "megatrain/launch"
_LAUNCH_DEADLINE_S = 10.0
_PR_SET_PDEATHSIG = 1


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return which of the processes of this host we are: the number of our GPU."""
    return _number(environment, "LOCAL_RANK", 0) if "LOCAL_RANK" in environment else 0


def read_environment(environment: Mapping[str, str]) -> Seat | None:
    """Return who we are; None for a process alone. Raises ConfigError for anything else."""
    given = [name for name in VARIABLES if environment.get(name)]
    if environment.get("WORLD_SIZE") == "1" or not {"RANK", "WORLD_SIZE"} & set(given):
        return None  # an address alone says nothing of ranks
    if missing := [name for name in VARIABLES if name not in given]:
        raise ConfigError(
            f"environment: {' and '.join(given)} set, {' and '.join(missing)} not. Start ranks "
            "with torchrun, which sets all four, or unset them to train with one process"
        )
    size = _number(environment, "WORLD_SIZE", 1)
    owner = Owner(_number(environment, "RANK", 0), size)
    if owner.rank >= size:
        raise ConfigError(
            f"environment: RANK is {owner.rank}, WORLD_SIZE {size}: ranks count from 0"
        )
    port = _number(environment, "MASTER_PORT", 1)
    if port >= 1 << 16:
        raise ConfigError(f"environment: MASTER_PORT is {port}, the last port is 65535")
    return Seat(
        owner=owner,
        address=environment["MASTER_ADDR"],
        port=port,
        agent=environment.get(_AGENT) == "True",
    )


def agent_seat(environment: Mapping[str, str]) -> Seat | None:
    """Return where the launcher's store is, also for a process alone; None if it has none."""
    given = [environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    if environment.get(_AGENT) != "True" or not all(given):
        return None
    port = _number(environment, "MASTER_PORT", 1)
    return Seat(owner=SOLE, address=given[0], port=port, agent=True)


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"environment: {name} is {text!r}, a number of at least {least} is needed"
        )
    return int(text)


def join_ranks(device: str, deadline_s: float) -> Ranks:
    """Return the ranks of this run, once all have come.

    Raises ConfigError if the environment is wrong, RankLost if others do not come in time.
    """
    seat = read_environment(os.environ)
    if seat is None:
        return ALONE
    import torch.distributed as dist  # a torch without it still trains with one process

    from megatrain.ranks.meeting import answered, choose_interface, meet
    from megatrain.ranks.torch_ranks import TorchRanks
    from megatrain.ranks.watch import Watch

    store, hosts = meet(seat, deadline_s)
    choose_interface(seat)
    timeout, owner = timedelta(seconds=deadline_s), seat.owner
    watch = answered(seat, deadline_s, lambda: Watch(store, owner, deadline_s))
    try:
        dist.init_process_group(
            "gloo", store=store, rank=owner.rank, world_size=owner.size, timeout=timeout
        )
        return TorchRanks(owner, device, deadline_s, watch)
    except RuntimeError as error:
        lost = RankLost(
            f"{seat.says}: all ranks met at {seat.address}:{seat.port}, then could not connect "
            f"to each other: {watch.diagnose(error)}\n  Hosts: {listing(set(hosts))}. If none is "
            "gone, set GLOO_SOCKET_IFNAME on each to the network interface that reaches the others."
        )
        watch.fail(lost)
        raise lost from error


def end_with_launcher() -> None:
    """Let this process get SIGTERM when its launcher dies, if it has one.

    Called by the main thread.
    """
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != launcher:
        os.kill(os.getpid(), signal.SIGTERM)


def launch_name(
    environment: Mapping[str, str] = os.environ, deadline_s: float = _LAUNCH_DEADLINE_S
) -> str | None:
    """Return the random name of the launch; None if it has none. Rank 0 asks."""
    if (seat := agent_seat(environment)) is None:
        return None
    from megatrain.ranks.meeting import answered  # imports torch.distributed

    try:
        return answered(seat, deadline_s, lambda: _name(seat, deadline_s))
    except RankLost:  # started by hand, with the environment of a launch that is over
        return None


def _name(seat: Seat, deadline_s: float) -> str:
    from megatrain.ranks.meeting import reach

    store: Any = reach(seat, deadline_s)
    name: bytes = store.compare_set(
        _LAUNCH_KEY, "", secrets.token_hex(16)
    )  # set if it is not there
    return name.decode()


def num_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started the ranks again."""
    text = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0
