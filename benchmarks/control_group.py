"""`megatrain train` in a control group whose memory limit the kernel enforces, without swap.

Whoever exceeds the limit is killed at once. Making a group needs root, or a group that was
delegated to us.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import DoesNotFit

OUTCOMES = {0: "finished", DoesNotFit.exit_code: "refused", 130: "stopped", -9: "died"}
_LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")
_PEAK_FILES = ("memory.max_usage_in_bytes", "memory.peak")


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
    group = parent / f"megatrain-{os.getpid()}"
    group.mkdir()
    try:
        limit = _file(group, _LIMIT_FILES)
        assert limit is not None, "memory_groups found it"
        limit.write_text(str(limit_bytes))
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        run = train(arguments, environment, enter)
        peak = _file(group, _PEAK_FILES)
        peak_bytes = None if peak is None else int(peak.read_text())
    finally:
        group.rmdir()
    assert run.returncode in OUTCOMES, run.stderr[-2000:]
    return CappedRun(outcome=OUTCOMES[run.returncode], peak_bytes=peak_bytes, text=run.stderr)


def _file(group: Path, names: Sequence[str]) -> Path | None:
    """Return the file of this version of control groups."""
    return next((group / name for name in names if (group / name).exists()), None)
