"""Programs in a control group whose memory limit the kernel enforces, without swap.

Whoever exceeds the limit is killed at once. Making a group needs root, or a group that was
delegated to us.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import DoesNotFit

OUTCOMES = {0: "finished", DoesNotFit.exit_code: "refused", 130: "stopped", -9: "died"}
_LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")
_PEAK_FILES = ("memory.max_usage_in_bytes", "memory.peak")
_SWAP_FILES = {"memory.memsw.limit_in_bytes": True, "memory.swap.max": False}
"""Whether the limit of swap counts memory too."""
LEAVING_S = 10.0
"""The kernel takes a moment to let go of a process that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A control group: a process that begins with `enter` is in it, and so are its children."""

    folder: Path

    @property
    def enter(self) -> list[str]:
        """Return the beginning of a command that runs in this group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def peak_bytes(self) -> int | None:
        """Return the most that the group held; None: not counted here."""
        peak = _file(self.folder, _PEAK_FILES)
        return None if peak is None else int(peak.read_text())


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedRun:
    """What became of a run."""

    outcome: str
    """One of OUTCOMES."""
    peak_bytes: int | None
    """Most that the group held, with what the kernel cached for it; None: not counted here."""
    text: str
    """What it printed on stderr."""


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


@contextmanager
def limited_group(parent: Path, limit_bytes: int) -> Iterator[Group]:
    """Make a group with this limit and no swap; at the end, end the processes that it still has."""
    folder = parent / f"megatrain-{os.getpid()}"
    folder.mkdir()
    try:
        limit = _file(folder, _LIMIT_FILES)
        assert limit is not None, "memory_groups found it"
        limit.write_text(str(limit_bytes))
        for name, with_memory in _SWAP_FILES.items():
            if (folder / name).exists():
                (folder / name).write_text(str(limit_bytes if with_memory else 0))
        yield Group(folder=folder)
    finally:
        _remove(folder)


def train(
    arguments: Sequence[str], environment: Mapping[str, str], before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Return the end of `megatrain train` with these arguments; `before` starts the command."""
    command = [*before, sys.executable, "-m", "megatrain", "train", *arguments]
    variables = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


def train_capped(
    parent: Path, limit_bytes: int, arguments: Sequence[str], environment: Mapping[str, str]
) -> CappedRun:
    """Return what became of `megatrain train` in a group of its own with this limit."""
    with limited_group(parent, limit_bytes) as group:
        run = train(arguments, environment, group.enter)
        peak_bytes = group.peak_bytes()
    assert run.returncode in OUTCOMES, run.stderr[-2000:]
    return CappedRun(outcome=OUTCOMES[run.returncode], peak_bytes=peak_bytes, text=run.stderr)


def _remove(folder: Path) -> None:
    """Remove a group, with the processes that are left in it."""
    deadline = time.monotonic() + LEAVING_S
    while left := (folder / "cgroup.procs").read_text().split():
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        assert time.monotonic() < deadline, f"{folder} still has {left}"
        time.sleep(0.01)
    folder.rmdir()


def _file(group: Path, names: Sequence[str]) -> Path | None:
    """Return the file of this version of control groups."""
    return next((group / name for name in names if (group / name).exists()), None)
