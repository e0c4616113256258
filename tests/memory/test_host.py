"""Laws of memory/host.py, on files as systems write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatrain.memory.host import (
    control_groups,
    free_bytes,
    is_in_memory,
    num_cores,
)

V1 = ("sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes", "3:cpu,memory:{}\n1:cpu:/\n")
V2 = ("sys/fs/cgroup", "max", "current", "0::{}\n")
System = tuple[str, str, str, str]


def write_group(root: Path, system: System, path: str, limit: str, used: int, cache: int) -> None:
    base, limit_name, used_name, _ = system
    folder = root / base / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{limit_name}").write_text(f"{limit}\n")
    (folder / f"memory.{used_name}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def write_membership(root: Path, system: System, path: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(system[3].format(path))


@pytest.mark.parametrize("system", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("tight", ["", "slice", "slice/job"])
def test_the_tightest_group_around_the_process_counts(
    tmp_path: Path, system: System, tight: str
) -> None:
    write_membership(tmp_path, system, "/slice/job")
    for path in ("", "slice", "slice/job", "slice/other"):
        limit = "1000000" if path == tight else "5000000" if path != "slice/other" else "1"
        write_group(tmp_path, system, path, limit, 400_000, 50_000)
    assert free_bytes(tmp_path) == 650_000
    assert len(list(control_groups(tmp_path))) == 3


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096), "", "many"])
@pytest.mark.parametrize("system", [V1, V2], ids=["v1", "v2"])
def test_no_limit_limits_nothing(tmp_path: Path, system: System, limit: str) -> None:
    write_membership(tmp_path, system, "/")
    write_group(tmp_path, system, "", limit, 400_000, 0)
    assert list(control_groups(tmp_path)) == []
    assert free_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize("system", [V1, V2], ids=["v1", "v2"])
def test_a_group_that_a_container_does_not_show_leaves_the_one_it_shows(
    tmp_path: Path, system: System
) -> None:
    write_membership(tmp_path, system, "/of/the/host")
    write_group(tmp_path, system, "", "1000000", 999_000, 0)
    assert free_bytes(tmp_path) == 1000


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    write_group(tmp_path, V2, "", "1000", 2000, 0)
    assert free_bytes(tmp_path) == 0


@pytest.mark.parametrize(("cpulist", "counted"), [("", False), ("72-143", True)])
def test_memory_of_a_node_without_cores_is_not_the_hosts(
    tmp_path: Path, cpulist: str, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GH200 lists them: node 0 has the cores, node 1 is the memory of the device."""
    available = 400 << 30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    for number, cores in enumerate(("0-71", cpulist)):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal: 100663296 kB\nNode {number} MemFree: {95 << 20} kB\n"
            f"Node {number} Inactive(file): {1 << 20} kB\n"
        )
    assert free_bytes(tmp_path) == available - (0 if counted else 96 << 30)


KEPT = """
import sys, torch
from megatrain.memory.host import give_back_at_once, resident_bytes
torch.empty(20 << 20, dtype=torch.uint8).fill_(1)  # malloc learns that this size comes and goes
if {told}:
    give_back_at_once()
before = resident_bytes()
tensors = [torch.empty(4 << 20, dtype=torch.uint8).fill_(1) for _ in range(40)]
del tensors[:-1]
print(resident_bytes() - before)
"""


@pytest.mark.merge
@pytest.mark.parametrize("told", [True, False])
def test_malloc_gives_back_what_is_freed_if_it_is_told(told: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEPT.format(told=told)], capture_output=True, text=True, check=True
    )
    kept = int(done.stdout) - (4 << 20)
    assert (kept < 16 << 20) == told


def test_cores_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert num_cores() == os.cpu_count()


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("scratch", True), ("scratch/a/b", True), ("scratch/disk/a", False), ("scratch2", False)],
)
def test_a_folder_in_memory_is_known_by_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, expected: bool
) -> None:
    kinds = {"": "ext4", "scratch": "tmpfs", "scratch/disk": "xfs"}
    mounts = [
        SimpleNamespace(mountpoint=str(tmp_path / name), fstype=kind)
        for name, kind in kinds.items()
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert is_in_memory(tmp_path / folder) is expected
