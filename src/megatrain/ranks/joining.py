"""Joining: from the environment that a launcher made to ranks that can talk.

Laws (tests/ranks/test_joining.py)
    1. A process alone makes no store and no group.
    2. Ranks that joined hear each other; any number of groups of ranks may follow one another.
"""

from __future__ import annotations

import os
from datetime import timedelta

from megatrain.errors import RankLost, listing
from megatrain.ranks.environment import read_environment
from megatrain.ranks.ranks import ALONE, Ranks


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
