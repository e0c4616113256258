"""Laws of memory/placement.py, on topologies that are made up, and on this system."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from megatrain.memory import placement as module
from megatrain.memory.arena import map_arena
from megatrain.memory.placement import (
    LANE_CORES,
    UPDATE_THREADS,
    Node,
    Policy,
    decide,
    device_node,
    read_nodes,
)

GIB = 1 << 30
CORES = frozenset(range(64))
LOW = Node(number=0, cores=frozenset(range(32)), free_bytes=400 * GIB)
HIGH = Node(number=1, cores=frozenset(range(32, 64)), free_bytes=400 * GIB)
SIBLINGS = [frozenset({core, core + 16}) for core in (*range(16), *range(32, 48))]


def test_one_node_is_left_to_the_system() -> None:
    alone = Node(number=0, cores=CORES, free_bytes=400 * GIB)
    for nodes in ([alone], []):
        found = decide(nodes, CORES, 0)
        assert found.kept is None
        assert found.copied(GIB) is None


def test_a_policy_of_the_user_stays() -> None:
    found = decide([LOW, HIGH], CORES, 1, has_policy=True)
    assert found.kept is None
    assert found.copied(GIB) is None
    assert found.lane_cores is not None
    assert found.lane_cores <= HIGH.cores


def test_copied_arenas_are_near_the_device_if_there_is_room() -> None:
    found = decide([LOW, HIGH], CORES, 1)
    spread = Policy(mode="interleave", nodes=(0, 1))
    assert found.kept == spread
    assert found.copied(100 * GIB) == Policy(mode="prefer", nodes=(1,))
    assert found.copied(100 * GIB + 1) == spread
    assert decide([LOW, HIGH], CORES, None).copied(GIB) == spread
    assert decide([LOW, HIGH], CORES, 7).copied(GIB) == spread


def test_a_rank_with_cores_of_one_node_keeps_its_states_there() -> None:
    found = decide([LOW, HIGH], HIGH.cores, 1)
    assert found.kept == found.copied(GIB) == Policy(mode="prefer", nodes=(1,))


def test_updates_and_lanes_share_no_core() -> None:
    found = decide([LOW, HIGH], CORES, 1, SIBLINGS)
    assert found.lane_cores == frozenset({32, 33, 34, 35, 48, 49, 50, 51})
    assert found.update_cores == CORES - found.lane_cores
    plain = decide([LOW, HIGH], CORES, None)
    assert plain.lane_cores == frozenset(range(LANE_CORES))
    few = decide([LOW, HIGH], frozenset(range(15)), 0)
    assert few.lane_cores is None
    assert few.update_cores is None


def test_updates_have_as_many_threads_as_memory_can_use() -> None:
    assert decide([LOW, HIGH], CORES, 0).update_threads == 32
    many = Node(number=0, cores=frozenset(range(192)), free_bytes=GIB)
    assert decide([many], many.cores, 0).update_threads == UPDATE_THREADS
    assert decide([], frozenset({3}), None).update_threads == 1


def _write_host(root: Path, allowed: str) -> None:
    base = root / "sys/devices/system/node"
    for number, cores in enumerate(("0-1,4-5", "2-3,6-7", "")):
        folder = base / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:  99 kB\nNode {number} MemFree:  30 kB\n"
            f"Node {number} Inactive(file):  12 kB\n"
        )
    (base / "has_memory").write_text("0-2\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Name:\tpython\nMems_allowed_list:\t{allowed}\n")
    folder = root / "sys/bus/pci/devices/0000:41:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")


def test_nodes_are_read_as_the_system_writes_them(tmp_path: Path) -> None:
    _write_host(tmp_path, "0-1")
    assert read_nodes(tmp_path) == (
        Node(number=0, cores=frozenset({0, 1, 4, 5}), free_bytes=42 << 10),
        Node(number=1, cores=frozenset({2, 3, 6, 7}), free_bytes=42 << 10),
    )
    assert device_node("0000:41:00.0", tmp_path) == 1
    assert device_node("0000:42:00.0", tmp_path) is device_node(None, tmp_path) is None
    (tmp_path / "sys/bus/pci/devices/0000:41:00.0/numa_node").write_text("-1\n")
    assert device_node("0000:41:00.0", tmp_path) is None
    assert read_nodes(tmp_path / "nothing") == ()


@pytest.mark.skipif(
    platform.system() != "Linux" or not Path("/sys/devices/system/node/node0").exists(),
    reason="the system has no NUMA",
)
def test_the_system_takes_a_policy() -> None:
    policy = Policy(mode="interleave", nodes=(0,))
    arena = map_arena("moments", 1 << 20)
    if not policy.apply(arena.data_ptr(), arena.nbytes):
        pytest.skip("the system forbids mbind, as containers do")
    assert _mode_at(arena.data_ptr()) == 3
    assert _mode_at(map_arena("moments", 1 << 20).data_ptr()) == 0
    assert _mode_at(map_arena("moments", 1 << 20, policy).data_ptr()) == 3
    assert not Policy(mode="prefer", nodes=(1023,)).apply(arena.data_ptr(), arena.nbytes)


def _mode_at(address: int) -> int:
    """Return the policy of an address, as the kernel tells."""
    mode = ctypes.c_int(-1)
    wants_address = 2
    assert module._system_call(1, ctypes.byref(mode), None, 0, address, wants_address)
    return mode.value
