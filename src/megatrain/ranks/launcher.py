"""The launcher of this process: who this rank is, how it joins the others, when it ends.

    WORLD_SIZE not set, or 1           a process alone
    RANK, WORLD_SIZE, MASTER_ADDR,     one of several: torch's elastic agent sets them, or whatever
    MASTER_PORT                        starts the same command on several hosts
    LOCAL_RANK                         which of the processes of its host: the number of its GPU

The agent is torchrun, or `megatrain train --gpus`, which calls it as a function (cli/launch.py). It
has the store at which ranks meet, and a folder with a file for each rank's error (`record`).

A rank ends when its agent does: on Linux the system sends it SIGTERM at the death of its parent.
The parent may have died before that, while this process was starting. Then a rank of `--gpus`,
which knows the agent's process id, sends the signal to itself; any other does not find the store.

The agent's store outlives a restart, and still has the words of the last attempt: gloo would
connect to ranks that are gone. So rank 0 gives each attempt a name of its own:

    rank 0      attempt = name                       name/came = the words of who came
    rank r                       name/r = a word

A rank has come once its own word is among those that rank 0 has heard.

Attempts of one launch share the folder of their errors, which the agent has made for them alone.
The id that a user gives torchrun may be that of another launch (`--rdzv-id 1`, or none at all).

Laws (tests/ranks/test_launcher.py)
    1. An environment that is half set, or says what cannot be, is refused by name.
    2. A process alone makes no store and no group.
    3. A process whose agent dies, or was dead before it asked, gets SIGTERM. Processes that it
       starts itself are told of no launcher.
    4. All attempts of one launch have the same name, and no other launch has it.
    5. What an earlier attempt has left in the store does no harm. Ranks that do not come within the
       deadline are named. A port that does not answer ends a rank after a few deadlines.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError, RankLost
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import ALONE, Ranks

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER = "MEGATRAIN_LAUNCHER"
"""The variable with the process id of the launcher, where that is the parent."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by torch's agent: FOLDER OF THE LAUNCH/attempt_N/LOCAL_RANK/error.json."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
SILENT = 3.0
"""Deadlines after which a store is silent. Connecting, meeting and making groups end before."""
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return which of the processes of this host we are: the number of our GPU."""
    return _number(environment, "LOCAL_RANK", 0) if "LOCAL_RANK" in environment else 0


def read_environment(environment: Mapping[str, str]) -> Owner | None:
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
    if (port := _number(environment, "MASTER_PORT", 1)) >= 1 << 16:
        raise ConfigError(f"environment: MASTER_PORT is {port}, the last port is 65535")
    return owner


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"environment: {name} is {text!r}, a number of at least {least} is needed"
        )
    return int(text)


def init_distributed(device: str, deadline_s: float) -> Ranks:
    """Return the ranks of this run, once all have come.

    Raises ConfigError if the environment is wrong, RankLost if others do not come in time.
    """
    owner = read_environment(os.environ)
    if owner is None:
        return ALONE
    import torch.distributed as dist  # a torch without it still trains with one process
    from torch.distributed.distributed_c10d import PrefixStore

    from megatrain.ranks.torch_ranks import TorchRanks, end_after, plain_text

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=deadline_s)
    silent = RankLost(
        f"rank {owner.rank} of {owner.size}: {address}:{port} accepts connections and does not "
        "answer. Another service may use this port: give another one, or end that service."
    )
    limit = end_after(SILENT * deadline_s, silent)  # a client of torch waits without one
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=owner.leads and os.environ.get(_AGENT_STORE) != "True",
            timeout=timeout,
            wait_for_workers=False,
        )
        name = _meet(store, owner, deadline_s)
        _choose_interface(address, port)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(name, store),
            rank=owner.rank,
            world_size=owner.size,
            timeout=timeout,
        )
        return TorchRanks(owner, device, deadline_s)
    except (RuntimeError, OSError, ValueError) as error:
        raise RankLost(
            f"rank {owner.rank} of {owner.size} on {socket.gethostname()} could not join the "
            f"others at {address}:{port} within {deadline_s:g} s: {plain_text(error)}\n  Is "
            "MASTER_ADDR the host of rank 0, is the command running on every host, does nothing "
            "else use this port, and does a firewall let the hosts reach each other? If so, set "
            "GLOO_SOCKET_IFNAME on each to the network interface that reaches the others."
        ) from error
    finally:
        limit.cancel()


def _meet(store: Any, owner: Owner, deadline_s: float) -> str:
    """Return the name of this attempt, once all its ranks have come."""
    ends = time.monotonic() + deadline_s
    own, name = f"{secrets.token_hex(8)} {socket.gethostname()}", ""
    came = {owner.rank: own}
    if owner.leads:
        name = secrets.token_hex(8)
        store.set("attempt", name)
    while len(came) < owner.size:
        if time.monotonic() > ends:
            missing = ", ".join(str(rank) for rank in range(owner.size) if rank not in came)
            hosts = [f"rank {rank} on {came[rank].split()[1]}" for rank in sorted(came)]
            raise TimeoutError(f"rank {missing} did not come; {', '.join(hosts)} did")
        time.sleep(_POLL_S)
        if owner.leads:
            for rank in range(owner.size):
                if rank not in came and store.check([f"{name}/{rank}"]):
                    came[rank] = store.get(f"{name}/{rank}").decode()
            store.set(f"{name}/came", json.dumps(list(came.items())))
            continue
        called = store.get("attempt").decode() if store.check(["attempt"]) else ""
        if called != name:  # the first name, or one that takes the place of an old one
            name = called
            store.set(f"{name}/{owner.rank}", own)
        if name and store.check([f"{name}/came"]):
            heard: dict[int, str] = dict(json.loads(store.get(f"{name}/came")))
            came = heard if heard.get(owner.rank) == own else came
    return name


def _choose_interface(address: str, port: int) -> None:
    """Let gloo use the interface that reaches where ranks meet, unless the user chose one.

    By itself it takes the one that this host's name resolves to, which is often the loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # nothing is sent: it only finds the route
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """Return an interface's IPv4 address."""
    with suppress(OSError):
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    return None


def end_with_launcher() -> None:
    """Let this process get SIGTERM when its launcher dies, if it has one.

    Called by the main thread.
    """
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None and ERROR_FILE not in os.environ:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher not in (None, str(os.getppid())):
        os.kill(os.getpid(), signal.SIGTERM)


def record(error: BaseException) -> bool:
    """Leave an error for the agent, which shows it to the user; return whether there is one."""
    if ERROR_FILE not in os.environ:
        return False
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    ErrorHandler().record_exception(error)
    return True


def launch_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what all attempts of this launch have in common, and no other launch has.

    None without an agent. Rank 0 asks.
    """
    if (path := environment.get(ERROR_FILE)) is None:
        return None
    return f"{socket.gethostname()} {Path(path).parents[2]}"


def num_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """Return how often the launcher has started the ranks again."""
    text = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0
