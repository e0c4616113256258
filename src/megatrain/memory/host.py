"""The host memory that this process may use: free memory, within the limits of its groups.

Control groups may be nested, each with its own limit; the tightest one applies. Some systems list
the memory of a device as a node of the host, without cores (GH200, GB200): that is the device's.

Laws (tests/memory/test_host.py)
    1. Free is the least that the machine, the process's group or one around it leaves.
    2. Page cache of a group is reclaimable, and counts as free.
    3. A limit that the system does not report is ignored.
    4. On request, malloc returns freed memory to the system.
    5. Memory of nodes without cores is not the host's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_M_MMAP_THRESHOLD = -3
"""Number of the option in malloc.h."""
_UNLIMITED = 1 << 60
"""Version 1 of control groups writes "no limit" as a number near 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A control group with a limit."""

    limit_bytes: int
    used_bytes: int
    """Page cache that gives way is not counted."""


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can still be allocated before something is killed."""
    left = [group.limit_bytes - group.used_bytes for group in control_groups(root)]
    own = int(psutil.virtual_memory().available) - _free_beyond_cores(root)
    return max(0, min([own, *left]))


def _free_beyond_cores(root: Path) -> int:
    """Return the bytes that nodes without cores have free."""
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    return sum(
        node_free_bytes(read_system_file(node / "meminfo"))
        for node in nodes
        if (node / "cpulist").exists() and not read_system_file(node / "cpulist").strip()
    )


def node_free_bytes(meminfo: str) -> int:
    """Return what a node has free, or would have without files that it caches."""
    rows = [line.replace(":", " ").split() for line in meminfo.splitlines()]
    fields = {row[2]: int(row[3]) for row in rows if len(row) > 3 and row[3].isdecimal()}
    return 1024 * (fields.get("MemFree", 0) + fields.get("Inactive(file)", 0))


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the most resident memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # bytes there, KiB elsewhere


def is_in_memory(folder: Path) -> bool:
    """Return whether files in a folder are memory and not on a disk, as far as mounts show it."""
    path = folder.resolve()
    mounts = psutil.disk_partitions(all=True)
    within = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    innermost = max(within, key=lambda mount: len(mount.mountpoint), default=None)
    return innermost is not None and innermost.fstype in ("tmpfs", "ramfs")


def num_cores() -> int:
    """Return the cores this process may use: all of them on systems that cannot restrict it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def give_back_at_once() -> None:
    """Let malloc return freed blocks of 1 MiB or more to the system instead of keeping them.

    It keeps up to some hundred MiB, now more, now less, and is faster for it: compute on the host's
    cores took 9 % longer without. So this is for runs whose memory is tight. It works with glibc.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def control_groups(root: Path = Path("/")) -> Iterator[Group]:
    """Yield the groups this process is in that have a limit, read from the files under `root`."""
    base = root / "sys/fs/cgroup"
    paths = dict(_group_paths(root))
    yield from _limited(base, paths.get("", ""), "max", "current")
    yield from _limited(
        base / "memory", paths.get("memory", ""), "limit_in_bytes", "usage_in_bytes"
    )


def _group_paths(root: Path) -> Iterator[tuple[str, str]]:
    """Yield controller and path of this process's groups; version 2 has none, `0::/path`."""
    for line in read_system_file(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path.lstrip("/")


def _limited(base: Path, path: str, limit_name: str, used_name: str) -> Iterator[Group]:
    """Yield the group at `path` and all around it; in a container they may not be visible."""
    inner = base / path
    for folder in [inner, *(outer for outer in inner.parents if outer.is_relative_to(base))]:
        limit = read_system_file(folder / f"memory.{limit_name}").strip()
        used = read_system_file(folder / f"memory.{used_name}").strip()
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            cache = _reclaimable(read_system_file(folder / "memory.stat"))
            yield Group(limit_bytes=int(limit), used_bytes=int(used) - cache)


def _reclaimable(stat: str) -> int:
    fields = dict(line.split()[:2] for line in stat.splitlines() if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def read_system_file(path: Path) -> str:
    """Return the text of a system file; empty if there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
