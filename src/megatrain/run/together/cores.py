"""The cores of a host, divided among its ranks: each has its own, near its GPU where /sys tells.

Without this, each rank would start a thread per core of the host, and all would take turns.

Laws (tests/run/together/test_cores.py)
    1. The ranks of a host have cores that no other has, and together use all that they may.
    2. A rank has cores of its GPU's node, if all GPUs of the host have a known node.
    3. Cores that a launcher has divided already stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.devices.device import Device
from megatrain.devices.runtime import pci_address
from megatrain.memory.placement import LANE_CORES, allowed_cores, device_node, read_nodes
from megatrain.ranks.ranks import Ranks

TORCH_THREADS = LANE_CORES
"""For work of the lanes on the host; more only take turns with updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a rank may use of its host."""

    cores: tuple[int, ...]
    node: int | None
    """The NUMA node of its GPU; None if unknown."""


def take_cores(ranks: Ranks, device: Device, root: Path = Path("/")) -> None:
    """Restrict this process to its share of the host's cores; threads that it has stay free.

    Where a device computes, torch gets few threads: cores are for lanes and updates.
    """
    if device.own_memory:
        torch.set_num_threads(min(torch.get_num_threads(), TORCH_THREADS))
    allowed = allowed_cores()
    if ranks.owner.is_alone or allowed is None:
        return
    node = device_node(pci_address(device.name), root)
    own = Allowance(cores=tuple(sorted(allowed)), node=node)
    heard = ranks.agree({"cores": own.cores, "node": own.node})
    near = ranks.neighbors()
    places = [Allowance(cores=tuple(heard[n]["cores"]), node=heard[n]["node"]) for n in near]
    nodes = {node.number: node.cores for node in read_nodes(root)}
    cores = shares(places, nodes)[near.index(ranks.owner.rank)]
    os.sched_setaffinity(0, cores)
    # Torch has counted the cores already.
    torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def shares(
    places: Sequence[Allowance], nodes: Mapping[int, frozenset[int]]
) -> list[tuple[int, ...]]:
    """Return the cores of each rank of a host, given the cores of each NUMA node."""
    if len({place.cores for place in places}) > 1:  # a launcher has divided them
        return [place.cores for place in places]
    cores = places[0].cores
    by_node = [
        () if place.node is None else tuple(c for c in cores if c in nodes.get(place.node, ()))
        for place in places
    ]
    wanted = by_node if all(by_node) else [cores] * len(places)
    found = []
    for number, those in enumerate(wanted):
        same = [other for other, cores_of in enumerate(wanted) if cores_of == those]
        found.append(_part(those, same.index(number), len(same)))
    return found


def _part(cores: tuple[int, ...], number: int, count: int) -> tuple[int, ...]:
    """Return an even part of some cores; all of them if there are fewer than parts."""
    if len(cores) < count:
        return cores
    return cores[number * len(cores) // count : (number + 1) * len(cores) // count]
