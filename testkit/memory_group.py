"""A control group whose memory limit the kernel enforces, without swap.

Whoever exceeds the limit is killed at once. Making a group needs root, or a group that was
delegated to us.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

_LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")
_SWAP_FILES = ("memory.memsw.limit_in_bytes", "memory.swap.max")
"""The first counts memory too."""
_UNLIMITED = {
    "memory.limit_in_bytes": "-1",
    "memory.memsw.limit_in_bytes": "-1",
    "memory.max": "max",
    "memory.swap.max": "max",
}
LEAVING_S = 10.0
"""The kernel takes a moment to let go of a process that has ended."""
_USED_FILES = ("memory.usage_in_bytes", "memory.current")
_PEAK_FILES = ("memory.max_usage_in_bytes", "memory.peak")
_EVENT_FILES = ("memory.oom_control", "memory.events")


def memory_groups() -> Path | None:
    """Return the folder in which groups with a limit of memory can be made."""
    for base in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        probe = base / f"megatrain-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        usable = _file(probe, _LIMIT_FILES) is not None
        probe.rmdir()
        if usable:
            return base
    return None


class MemoryGroup:
    """A group in a folder that `memory_groups` found; what is left in it ends with the block."""

    def __init__(self, parent: Path) -> None:
        self.folder = parent / f"megatrain-{os.getpid()}"

    def __enter__(self) -> Self:
        self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + LEAVING_S
        while left := (self.folder / "cgroup.procs").read_text().split():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            assert time.monotonic() < deadline, f"{self.folder} still has {left}"
            time.sleep(0.01)
        self.folder.rmdir()

    def limit(self, num_bytes: int | None) -> None:
        """Let the group have so many bytes and no swap; None: all. OSError: it holds more."""
        file = _file(self.folder, _LIMIT_FILES)
        assert file is not None, "memory_groups found it"
        swap = _file(self.folder, _SWAP_FILES)
        if swap is not None and num_bytes is None:
            swap.write_text(_UNLIMITED[swap.name])  # first: in version 1 it is never below
        file.write_text(_UNLIMITED[file.name] if num_bytes is None else str(num_bytes))
        if swap is not None and num_bytes is not None:
            swap.write_text(str(num_bytes) if "memsw" in swap.name else "0")

    def take_in(self, pid: int) -> None:
        """Move a process here; what it already holds stays with its former group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def enter(self) -> list[str]:
        """Return the beginning of a command that runs in this group, and its children too."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    @property
    def used_bytes(self) -> int | None:
        """What the group holds, with what the kernel cached for it; None: not counted here."""
        return self._count(_USED_FILES)

    def peak_bytes(self) -> int | None:
        """Return the most that the group held; None: not counted here."""
        return self._count(_PEAK_FILES)

    @property
    def num_killed(self) -> int:
        """How many processes of the group the kernel has killed for memory."""
        file = _file(self.folder, _EVENT_FILES)
        lines = [] if file is None else file.read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def _count(self, names: Sequence[str]) -> int | None:
        file = _file(self.folder, names)
        return None if file is None else int(file.read_text())


def _file(group: Path, names: Sequence[str]) -> Path | None:
    """Return the file of this version of control groups."""
    return next((group / name for name in names if (group / name).exists()), None)
