"""What a launcher said in the environment: how many ranks, which one, and where they meet.

    WORLD_SIZE not set, or 1           a process alone
    RANK, WORLD_SIZE, MASTER_ADDR,     one of several: torchrun sets them, or whatever starts the
    MASTER_PORT                        same command on several hosts
    LOCAL_RANK                         which of the processes of its host: the number of its GPU

Laws (tests/ranks/test_environment.py)
    1. An environment that is half set, or says what cannot be, is refused by name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.errors import ConfigError
from megatrain.ranks.ownership import SOLE, Owner

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Who this process is, and where ranks meet."""

    owner: Owner
    address: str
    port: int
    agent: bool
    """Whether the launcher has the store, and not rank 0."""

    @property
    def says(self) -> str:
        """How a message begins."""
        return f"rank {self.owner.rank} of {self.owner.size} on {socket.gethostname()}"


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
