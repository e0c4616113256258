"""This process as a rank of a run: it joins, takes its cores, and leaves with the others.

    with joined("auto", 600.0) as ranks:
        ...                            # ALONE in a process that nobody started with others

A rank that fails leaves the others at once, by which they end too; the agent that started it has
its reason. All leave together from a run that has ended, also early on request: none is gone while
another still writes.

The cores of a host are divided among its ranks, near each GPU where /sys tells. Without this, each
rank would start a thread per core of the host, and all would take turns.

All ranks need the same installation, and a version does not say which code runs: an edited clone
keeps its number. The code is known by a hash of every Python file of the package, the native kernel
by a hash of its library.

A run that its launcher starts again resumes by itself. The run folder keeps the name of the launch
that began or resumed it, and in which attempt. Only a later attempt of that very launch resumes
unasked. A command that was refused, because the folder has another run, has left no name there: it
stays refused, whatever id its launcher was given.

Laws (tests/run/test_this_rank.py, tests/run/test_torchrun.py)
    1. A rank that fails leaves at once, and ends soon; a common end does not look like a failure.
    2. A process alone joins nothing.
    3. The ranks of a host have cores that no other has, and together use all that they may. A rank
       has cores of its GPU's node, if all GPUs of the host have a known node. Cores that a launcher
       has divided already stay as they are.
    4. A changed, added, removed or renamed Python file of the package changes the hash of the code;
       caches of the interpreter do not. A native kernel of other bytes, or the torch kernel in its
       place, is another kernel.
    5. A restart resumes the run that its own launch has begun, and no other. Rank 0 decides for
       all.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from megatrain.devices.accelerator import find_device
from megatrain.devices.device import Device
from megatrain.devices.runtime import pci_address
from megatrain.errors import Interrupted
from megatrain.memory.host import read_system_file
from megatrain.memory.placement import LANE_CORES, allowed_cores, device_node, read_nodes
from megatrain.optim.native import LIBRARY, NativeKernel, load_kernel
from megatrain.ranks.launcher import (
    init_distributed,
    launch_name,
    local_rank,
    num_restarts,
    read_environment,
)
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import LAUNCH_FILE, RunFolder
from megatrain.run.interrupts import Interrupts
from megatrain.version import __version__

DEADLINE_S = 600.0
"""The default of train.rank_deadline, for commands that have no config."""
TORCH_THREADS = LANE_CORES
"""Threads for work of the lanes on the host; more only take turns with updates."""
PACKAGE = Path(__file__).parents[1]


@contextmanager
def joined(device: str, deadline_s: float = DEADLINE_S) -> Iterator[Ranks]:
    """Join the ranks that were started with this one, which compute on `device`; then leave."""
    owner = read_environment(os.environ)
    if owner is None:
        yield ALONE
        return
    with together(init_distributed(place_of(device, owner).name, deadline_s)) as ranks:
        yield ranks


@contextmanager
def together(ranks: Ranks) -> Iterator[Ranks]:
    """Leave when all are done, or at once if this rank has failed."""
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
    owner = read_environment(os.environ)
    return Interrupts(shared=owner is not None, speaks=owner is None or owner.leads)


def place_of(
    device: str, owner: Owner, cap_bytes: int | None = None, *, in_place: bool = True
) -> Device:
    """Return the device called `device` that is this process's own."""
    number = None if owner.is_alone else local_rank()
    return find_device(device, cap_bytes=cap_bytes, local_rank=number, in_place=in_place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The cores of its host that a rank may use."""

    cores: tuple[int, ...]
    node: int | None
    """The NUMA node of its GPU; None if unknown."""


def take_cores(ranks: Ranks, device: Device) -> None:
    """Restrict this process to its share of the host's cores; threads that it has stay free.

    Where a device computes, torch gets few threads: cores are for lanes and updates.
    """
    if device.own_memory:
        torch.set_num_threads(min(torch.get_num_threads(), TORCH_THREADS))
    allowed = allowed_cores()
    if ranks.owner.is_alone or allowed is None:
        return
    node = device_node(pci_address(device.name))
    own = Allowance(cores=tuple(sorted(allowed)), node=node)
    heard = ranks.agree({"cores": own.cores, "node": own.node})
    near = ranks.neighbors()
    places = [Allowance(cores=tuple(heard[n]["cores"]), node=heard[n]["node"]) for n in near]
    nodes = {node.number: node.cores for node in read_nodes()}
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


def installed_facts() -> dict[str, str]:
    """Return what the bits of a run depend on. Reads some 300 small files the first time."""
    import numpy
    import tokenizers
    import torch
    import transformers

    packages = (numpy, tokenizers, torch, transformers)
    versions = {"megatrain": __version__, "Python": platform.python_version()}
    versions |= {package.__name__: package.__version__ for package in packages}
    return {
        "code of megatrain": code_digest(PACKAGE),
        "kernel": kernel_name(LIBRARY),
        **{f"version of {name}": version for name, version in versions.items()},
    }


@functools.cache
def code_digest(package: Path) -> str:
    """Return the hash of all Python files of a package, with their names."""
    found = xxhash.xxh3_128()
    for path in sorted(package.rglob("*.py")):
        data = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()


@functools.cache
def kernel_name(library: Path) -> str:
    """Return the kernel that updates use: native with the hash of its library, or torch."""
    if isinstance(load_kernel(library), NativeKernel):
        return f"native, {library.name} {xxhash.xxh3_128_hexdigest(library.read_bytes())}"
    return "torch"


def note_launch(folder: RunFolder, environment: Mapping[str, str] = os.environ) -> None:
    """Keep the name of the launch and the number of its attempt, if it has a name."""
    if (name := launch_name(environment)) is not None:
        folder.write(LAUNCH_FILE, f"{name} {num_restarts(environment)}\n")


def was_restarted(
    run: Path, ranks: Ranks = ALONE, environment: Mapping[str, str] = os.environ
) -> bool:
    """Return whether an earlier attempt of this launch has begun the run. All ranks ask."""
    return bool(ranks.decide(lambda: _has_begun(run, environment)))


def _has_begun(run: Path, environment: Mapping[str, str]) -> bool:
    if not num_restarts(environment):
        return False
    name, _, attempt = read_system_file(run / LAUNCH_FILE).strip().rpartition(" ")
    is_earlier = attempt.isdecimal() and int(attempt) < num_restarts(environment)
    return is_earlier and name == launch_name(environment)
