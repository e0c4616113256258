"""One of the ranks of a run, from joining to leaving.

    with joined("auto", 600.0) as ranks:
        ...                            # ALONE in a process that nobody started with others

A rank that fails says so before it goes, so that the others can name it. All leave together from a
run that has ended, also early on request: none is gone while another still writes.

Laws (tests/run/together/test_joined.py)
    1. A failure reaches the other ranks with its words; a common end does not look like one.
    2. A process alone joins nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatrain.devices.accelerator import find_device
from megatrain.devices.device import Device
from megatrain.errors import Interrupted
from megatrain.ranks.launcher import join_ranks, local_rank, read_environment
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.interrupts import Interrupts

DEADLINE_S = 600.0
"""Of commands that have no config: the default of train.rank_deadline."""


@contextmanager
def joined(device: str, deadline_s: float = DEADLINE_S) -> Iterator[Ranks]:
    """Join the ranks that were started with this one, which compute on `device`; then leave."""
    seat = read_environment(os.environ)
    if seat is None:
        yield ALONE
        return
    with together(join_ranks(place_of(device, seat.owner).name, deadline_s)) as ranks:
        yield ranks


@contextmanager
def together(ranks: Ranks) -> Iterator[Ranks]:
    """Leave when all are done, or say why this rank has to end."""
    try:
        try:
            yield ranks
        except Interrupted:  # all ranks were asked to end, and have agreed to
            ranks.agree({})
            raise
        ranks.agree({})
    except Interrupted:
        raise
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        ranks.close()


def interrupts_of_rank() -> Interrupts:
    """Return what listens to signals for this process, alone or one of several.

    Raises ConfigError.
    """
    seat = read_environment(os.environ)
    return Interrupts(shared=seat is not None, speaks=seat is None or seat.owner.leads)


def place_of(device: str, owner: Owner, cap_bytes: int | None = None) -> Device:
    """Return the device called `device` that is this process's own."""
    number = None if owner.is_alone else local_rank()
    return find_device(device, cap_bytes=cap_bytes, local_rank=number)
