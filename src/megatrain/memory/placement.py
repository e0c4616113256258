"""The place of arenas and threads on a host of several NUMA nodes, decided from /sys.

    copied arenas   weights, gradients, tape: on the device's node, whose link they cross
    kept arenas     masters and moments: spread over the nodes whose cores update them
    lanes           a few cores of the device's node, which updates leave alone

`decide` is arithmetic on facts; `Policy.apply` is the system call. Placement changes no bits. What
the user has chosen stays: a policy of numactl, and the cores of taskset or of a launcher.

Laws (tests/memory/test_placement.py)
    1. One node, or a policy of the user: no arena is placed.
    2. A copied arena is on the device's node if that has room, else spread like the others.
    3. Updates and device lanes share no core, nor the two threads of one.
    4. A fact that the system does not report restricts nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from megatrain.memory.host import node_free_bytes, read_system_file

LANE_CORES = 4
"""Three lanes that feed the device, and autograd's thread."""
LEAST_CORES = 16
"""On a host with fewer, all threads share all cores."""
UPDATE_THREADS = 24
"""Threads of a node. More do not raise the rate of its memory: predicted from data sheets."""
NEAR_SHARE = 4
"""A copied arena takes at most a fourth of what is free on the device's node: weights and gradients
are one each, and the rest holds this node's share of masters and moments."""

_MODES = {"prefer": 1, "interleave": 3}
"""Numbers of modes in linux/mempolicy.h."""
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of mbind and get_mempolicy, which the C library does not wrap."""
_MASK_BITS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NUMA node with memory."""

    number: int
    cores: frozenset[int]
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The nodes that give pages; any other does when they have none left."""

    mode: Literal["prefer", "interleave"]
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        where = ", ".join(map(str, self.nodes))
        return f"node {where}" if self.mode == "prefer" else f"nodes {where} in turn"

    def apply(self, address: int, num_bytes: int) -> bool:
        """Ask for it, for pages not yet touched. Returns False if the system refused."""
        mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
        for node in self.nodes:
            mask[node // 64] |= 1 << node % 64
        return _system_call(
            0, address, num_bytes, _MODES[self.mode], ctypes.byref(mask), _MASK_BITS + 1, 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Nodes and cores for the arenas and threads of a process."""

    kept: Policy | None = None
    """Policy of arenas that only the host's cores use; None: as the system does it."""
    near: Node | None = None
    """The device's node, if arenas are placed and the system knows it."""
    lane_cores: frozenset[int] | None = None
    """Cores of the lanes that feed the device; None: any."""
    update_cores: frozenset[int] | None = None
    """Cores of updates; None: any."""
    update_threads: int = 1
    allocate: Callable[[str, int], Tensor] | None = None
    """Makes arenas that are copied, by name and bytes, where the device can pin no others; None:
    they are mapped, and pinned in place."""

    def copied(self, num_bytes: int) -> Policy | None:
        """Return the policy of an arena of this size that is copied to or from the device."""
        if self.near is None or NEAR_SHARE * num_bytes > self.near.free_bytes:
            return self.kept
        return Policy(mode="prefer", nodes=(self.near.number,))

    def __str__(self) -> str:
        memory = "as the system places it"
        if self.kept is not None:
            near = self.kept if self.near is None else f"node {self.near.number}"
            memory = f"copied {near}, states {self.kept}"
        lanes = "" if self.lane_cores is None else f", {len(self.lane_cores)} cores for lanes"
        return f"{memory}; {self.update_threads} update threads{lanes}"


UNPLACED = Placement()


def find_placement(pci_address: str | None, root: Path = Path("/")) -> Placement:
    """Return the placement of this process for a device at an address of the bus, if it has one."""
    cores = allowed_cores()
    if cores is None:
        return UNPLACED
    return decide(
        read_nodes(root),
        cores,
        device_node(pci_address, root),
        [siblings for core in cores if (siblings := _threads_of(core, root))],
        has_policy=_has_policy(),
    )


def decide(
    nodes: Sequence[Node],
    cores: frozenset[int],
    device_node: int | None,
    siblings: Iterable[frozenset[int]] = (),
    *,
    has_policy: bool = False,
) -> Placement:
    """Return the placement of a process that may use `cores`, on a host with these `nodes`.

    `siblings` are cores of the system that are threads of one core; `has_policy`: the user has
    placed the memory.
    """
    own = [node for node in nodes if node.cores & cores]
    near = next((node for node in nodes if node.number == device_node), None)
    lanes = _lane_cores(cores, near.cores if near is not None else cores, tuple(siblings))
    threads = min(max(1, len(cores) // 2), UPDATE_THREADS * max(1, len(own)))
    updates = None if lanes is None else cores - lanes
    if len(nodes) < 2 or not own or has_policy:
        return Placement(lane_cores=lanes, update_cores=updates, update_threads=threads)
    numbers = tuple(node.number for node in own)
    return Placement(
        kept=Policy(mode="prefer" if len(own) == 1 else "interleave", nodes=numbers),
        near=near,
        lane_cores=lanes,
        update_cores=updates,
        update_threads=threads,
    )


def read_nodes(root: Path = Path("/")) -> tuple[Node, ...]:
    """Return the nodes with memory that this process may use."""
    base = root / "sys/devices/system/node"
    status = read_system_file(root / "proc/self/status").splitlines()
    allowed = [line.split(":")[1] for line in status if line.startswith("Mems_allowed_list:")]
    found = []
    for number in sorted(_numbers(read_system_file(base / "has_memory"))):
        if not allowed or number in _numbers(allowed[0]):
            folder = base / f"node{number}"
            cores = _numbers(read_system_file(folder / "cpulist"))
            free = node_free_bytes(read_system_file(folder / "meminfo"))
            found.append(Node(number=number, cores=cores, free_bytes=free))
    return tuple(found)


def device_node(pci_address: str | None, root: Path = Path("/")) -> int | None:
    """Return the node of a device on the bus; None if the system does not know."""
    text = read_system_file(root / f"sys/bus/pci/devices/{pci_address}/numa_node").strip()
    return int(text) if text.isdecimal() else None  # -1: unknown


def allowed_cores() -> frozenset[int] | None:
    """Return the cores this process may use; None on systems that cannot restrict it."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _lane_cores(
    cores: frozenset[int], near: frozenset[int], siblings: tuple[frozenset[int], ...]
) -> frozenset[int] | None:
    """Return whole cores for lanes, near the device if any of those may be used."""
    if len(cores) < LEAST_CORES:
        return None
    left, wanted = sorted(near & cores or cores), frozenset[int]()
    for _ in range(LANE_CORES):
        core = next((core for core in left if core not in wanted), None)
        if core is not None:
            wanted |= next((group & cores for group in siblings if core in group), {core})
    return wanted if len(wanted) < len(cores) else None


def _threads_of(core: int, root: Path) -> frozenset[int]:
    folder = root / f"sys/devices/system/cpu/cpu{core}/topology"
    return _numbers(read_system_file(folder / "thread_siblings_list"))


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list like 0-3,8-11."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(n for a, _, b in ends for n in range(int(a), int(b or a) + 1))


def _has_policy() -> bool:
    """Return whether this process was started with a policy, as by numactl."""
    mode = ctypes.c_int(0)
    asked = _system_call(1, ctypes.byref(mode), None, 0, None, 0)
    return asked and mode.value != 0


def _system_call(which: int, *arguments: object) -> bool:
    """Make one of `_CALLS`. Returns False if the system refuses it, or has none."""
    calls = _CALLS.get(platform.machine())
    if calls is None or platform.system() != "Linux":
        return False
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(calls[which]), *wide)) == 0
