"""Programs in a control group whose memory limit the kernel enforces, without swap."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import DoesNotFit
from testkit.memory_group import MemoryGroup
from testkit.memory_group import memory_groups as memory_groups

OUTCOMES = {0: "finished", DoesNotFit.exit_code: "refused", 130: "stopped", -9: "died"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedRun:
    """What became of a run."""

    outcome: str
    """One of OUTCOMES."""
    peak_bytes: int | None
    """Most that the group held, with what the kernel cached for it; None: not counted here."""
    text: str
    """What it printed on stderr."""


@contextmanager
def limited_group(parent: Path, limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a group with this limit and no swap; at the end, end the processes that it still has."""
    with MemoryGroup(parent) as group:
        group.limit(limit_bytes)
        yield group


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
